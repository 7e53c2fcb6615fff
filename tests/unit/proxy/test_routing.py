"""What an engine says of its experts is kept only if it is of just the tokens that the turn adds."""

import base64
import io
from typing import Any, cast

import numpy as np
import pytest

from openforge.protos import BranchCause, pack_ids
from openforge.proxy import routing
from openforge.proxy.routing import routed_file, routed_from
from openforge.proxy.turns import Placement, Sampled

CONTINUED = Placement(
    question=cast(Any, None),
    cause=BranchCause.CONTINUED,
    parent=0,
    prefix=4,
    kept=0,
    prompt=pack_ids(range(6)),
    tools=b"",
    same_tools=True,
)
"""Six prompt tokens, four of them the parent's. With three sampled ones tokens 3 to 7 are new and were computed."""


def _told(tokens: int, dtype: type = np.uint8) -> str:
    file = io.BytesIO()
    np.save(file, np.zeros((tokens, 3, 2), dtype), allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


def _answer(routed: str) -> Sampled:
    return Sampled(ids=[7, 8, 9], logprobs=[-1.0] * 3, routed=routed)


async def test_a_file_of_just_the_new_tokens_is_kept_as_it_came() -> None:
    assert routed_from(CONTINUED) == 3
    assert await routed_file(CONTINUED, _answer(_told(5))) == base64.b64decode(_told(5))
    assert await routed_file(CONTINUED, _answer("")) is None


@pytest.mark.parametrize(
    "told",
    [_told(4), _told(6), _told(5, np.float32), _told(5)[:-8], "no base64!", base64.b64encode(b"no file").decode()],
)
async def test_anything_else_is_left_out_and_costs_no_call(told: str) -> None:
    assert await routed_file(CONTINUED, _answer(told)) is None


async def test_a_file_above_the_bound_is_not_even_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "MOST_BYTES", 64)
    assert await routed_file(CONTINUED, _answer(_told(5))) is None

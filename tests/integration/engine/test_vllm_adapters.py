"""Low-rank adapters in flight into a real vLLM server, against what peft makes of them. `make test-vllm`.

One server serves all tests, in their order.
"""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
from engine_fixtures import publish_adapters
from reference_model import largest_difference
from safetensors.torch import load_file, save_file
from vllm_world import NEAR, PROMPT, Served, spans, stated, vllm_serving

from openforge.models import get
from openforge.weights import ADAPTERS, BadWeights, Written, folder_name, read_manifest, write_folder

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

VERSIONS = 3
TOKENS = 200


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Written, Path]]:
    root, model = tmp_path_factory.mktemp("vllm"), get("smollm2-135m")
    wholes = [root / f"whole-{version}" for version in range(VERSIONS)]
    return [
        (publish_adapters(root / "weights", model, version, whole, "all-linear"), whole)
        for version, whole in enumerate(wholes)
    ]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(published: list[tuple[Written, Path]]) -> AsyncIterator[Served]:
    first = published[0][0]
    async with vllm_serving(first, first.path.parent, [whole for _, whole in published]) as served:
        yield served


async def _apply(served: Served, written: Written, version: int) -> None:
    outcome = await served.driver.apply(written.path, written.digest, version)
    assert outcome.probe_error < NEAR


async def test_who_asks_for_the_policy_gets_it_with_its_adapters(served: Served) -> None:
    answer = await served.generate(PROMPT, ignore_eos=True)
    assert spans(answer) == [("0", 0, 16)]
    assert largest_difference(stated(answer), served.truth(0, PROMPT, answer.choices[0].token_ids)) < NEAR


async def test_adapters_change_in_flight_twice_and_what_old_ones_computed_is_not_used_again(
    served: Served, published: list[tuple[Written, Path]]
) -> None:
    """Requests from before a swap name the folder of their adapters; the second swap shows that none brings it back."""
    child = served.driver._child
    tasks = [[*PROMPT, 500 + index] for index in range(2)]
    asked = [asyncio.create_task(served.generate(ids, max_tokens=TOKENS, ignore_eos=True)) for ids in tasks]
    await served.until_running(2)
    await _apply(served, published[1][0], 1)
    joined = asyncio.create_task(served.generate([*PROMPT, 700], max_tokens=TOKENS, ignore_eos=True))
    await served.until_running(3)
    await _apply(served, published[2][0], 2)
    assert served.driver._child is child
    answers = await asyncio.gather(*asked, joined)
    assert [[version for version, _, _ in spans(answer)] for answer in answers] == [
        ["0", "1", "2"],
        ["0", "1", "2"],
        ["1", "2"],
    ]
    for ids, answer in zip([*tasks, [*PROMPT, 700]], answers, strict=True):
        sampled, told = answer.choices[0].token_ids, stated(answer)
        for version, start, end in spans(answer):
            assert largest_difference(told[start:end], served.truth(int(version), ids, sampled)[start:end]) < NEAR
    again = await served.generate(PROMPT, ignore_eos=True)  # its prefix was cached under the first adapters
    assert spans(again) == [("2", 0, 16)]
    assert largest_difference(stated(again), served.truth(2, PROMPT, again.choices[0].token_ids)) < NEAR


async def test_adapters_that_vllm_cannot_load_cost_the_server_and_those_before_are_served_again(
    served: Served, published: list[tuple[Written, Path]]
) -> None:
    good = published[2][0].path
    stated_by_learner = msgspec.structs.replace(read_manifest(good), version=3, files={}, tensors={})
    broken = write_folder(good.parent / folder_name(3, 0), stated_by_learner, partial(_misnamed, good))
    child = served.driver._child
    with pytest.raises(BadWeights, match="could not serve"):
        await served.driver.apply(broken.path, broken.digest, 3)
    assert served.driver._child is not child
    assert await served.version() == "2"
    answer = await served.generate(PROMPT)
    assert largest_difference(stated(answer), served.truth(2, PROMPT, answer.choices[0].token_ids)) < NEAR


def _misnamed(good: Path, draft: Path) -> None:
    (draft / "adapter_config.json").write_bytes((good / "adapter_config.json").read_bytes())
    tensors = load_file(good / ADAPTERS)
    save_file({name.replace("q_proj", "nobody"): tensor for name, tensor in tensors.items()}, draft / ADAPTERS)

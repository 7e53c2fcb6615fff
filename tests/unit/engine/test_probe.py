"""Weights are served only where every log-prob of the probe is near what their writer computed."""

from pathlib import Path

import pytest

from openforge.engine.probe import judge_probe
from openforge.weights import BadWeights, Probe

PROBE = Probe(prompt_ids=(1,), token_ids=(2, 3, 4), logprobs=(-1.0, -2.0, -3.0))


def test_the_largest_difference_is_told() -> None:
    assert judge_probe((-1.0, -2.25, -3.125), PROBE, Path("w"), "bfloat16") == 0.25


@pytest.mark.parametrize("found", [(-1.0, -2.0, -3.6), (-1.0, float("nan"), -3.0), (float("nan"), -2.0, -3.0)])
def test_weights_that_compute_something_else_are_refused(found: tuple[float, ...]) -> None:
    with pytest.raises(BadWeights, match="not served"):
        judge_probe(found, PROBE, Path("w"), "bfloat16")

"""What `openforge eval` makes of a run file, before anything starts."""

from pathlib import Path

import pytest

from openforge.cli.evaluate.plan import overrides_for, runs_of
from openforge.runs import BadRunFile, load_run_file

EXAMPLE = Path(__file__).parents[3] / "examples" / "eval.toml"
HARNESSES = ["mini-swe-agent", "openai-script"]


@pytest.mark.parametrize(("url", "repeats"), [("", True), ("http://127.0.0.1:1/v1", False)])
def test_an_engine_of_our_own_repeats_its_answers_in_an_evaluation(url: str, repeats: bool) -> None:
    runs = runs_of(load_run_file(EXAMPLE, overrides_for(url, "m", "")), "e")
    assert {harness: run.engine.batch_invariant for harness, run in runs.items()} == dict.fromkeys(HARNESSES, repeats)


def test_no_other_engine_can_be_told_to_repeat_its_answers() -> None:
    with pytest.raises(BadRunFile, match=r'engine.batch_invariant = true with engine.kind = "vllm".*leave it out'):
        load_run_file(EXAMPLE, ["engine.batch_invariant=true", 'engine.kind="vllm"'])

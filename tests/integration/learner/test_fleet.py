"""Two ranks compute what one computes, and load what one saved."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from learner_world import ROOT, tiny_model

SCRIPT = ROOT / "tests/support/fleet_steps.py"


EVERYTHING = {
    "algorithm": {
        "advantage": "gae",
        "loss": "ppo_clip",
        "objective": "decoupled",
        "correction": "icepop",
        "kl_coefficient": 0.1,
        "aggregation": "episode_mean",
        "mini_batches": 2,
    },
    "learner": {"lora": {"rank": 4, "targets": ["q_proj", "down_proj"]}, "critic_learning_rate": 1e-3},
}


def steps(
    model: Path, world: int, out: Path, load: Path | None = None, sections: dict[str, Any] | None = None
) -> dict[str, Any]:
    paths = [str(ROOT / part) for part in ("protos", "libs", "services", "envs", "tests/support")]
    subprocess.run(
        [
            *(sys.executable, str(SCRIPT), str(model), str(world), str(out), json.dumps(sections or {})),
            *([str(load)] if load else []),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        timeout=900,
        check=True,
    )
    return dict(json.loads((out / "seen.json").read_text()))


def close(left: Any, right: Any, tolerance: float) -> bool:
    return flat(left) == pytest.approx(flat(right), rel=tolerance, abs=tolerance)


def flat(value: Any) -> list[float]:
    """All numbers of nested lists and dictionaries, in order."""
    match value:
        case dict():
            return flat(list(value.values()))
        case list():
            return [number for inner in value for number in flat(inner)]
        case _:
            return [float(value)]


def test_two_ranks_equal_one_and_checkpoints_change_hands(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    alone = steps(model, 1, tmp_path / "one")
    together = steps(model, 2, tmp_path / "two")
    assert close(alone["steps"], together["steps"], 1e-5)
    assert close(alone["logprobs"], together["logprobs"], 1e-5)
    assert close(alone["weights"], together["weights"], 1e-4)
    resumed = steps(model, 1, tmp_path / "resumed", tmp_path / "two/state")
    spread = steps(model, 2, tmp_path / "spread", tmp_path / "one/state")
    assert close(resumed["steps"], spread["steps"], 1e-4)


@pytest.mark.heavy
def test_critic_reference_centre_and_adapters_are_the_same_on_two_ranks(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    alone = steps(model, 1, tmp_path / "one", sections=EVERYTHING)
    together = steps(model, 2, tmp_path / "two", sections=EVERYTHING)
    assert close(alone["steps"], together["steps"], 1e-4)
    assert close(alone["logprobs"], together["logprobs"], 1e-4)
    resumed = steps(model, 1, tmp_path / "resumed", tmp_path / "two/state", EVERYTHING)
    spread = steps(model, 2, tmp_path / "spread", tmp_path / "one/state", EVERYTHING)
    assert close(resumed["steps"], spread["steps"], 1e-3)

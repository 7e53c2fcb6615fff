"""Two ranks compute what one computes, and load what one saved."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fleet_runs import close, steps
from learner_world import tiny_model
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

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


def state(folder: Path) -> dict[str, Any]:
    """Everything that a checkpoint holds, by its path in it, whole: weights, optimizer, random numbers."""
    dcp_to_torch_save(folder, folder.parent / "whole.pt")
    return dict(leaves("", torch.load(folder.parent / "whole.pt", weights_only=False)))


def leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield path, value
    else:
        for name, inner in items:
            yield from leaves(f"{path}/{name}", inner)


def same_state(left: Path, right: Path) -> bool:
    """Bit for bit."""
    one, other = state(left), state(right)
    assert any("exp_avg_sq" in name for name in one), "the optimizer's moments are in it"
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        for name, value in one.items()
    )


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


def test_weights_and_optimizer_are_the_same_bits_however_many_ranks_hold_them(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    steps(model, 2, tmp_path / "two")
    steps(model, 1, tmp_path / "one", tmp_path / "two/state")
    steps(model, 2, tmp_path / "back", tmp_path / "one/state")
    assert same_state(tmp_path / "two/state", tmp_path / "one/state")
    assert same_state(tmp_path / "two/state", tmp_path / "back/state")


@pytest.mark.heavy
def test_critic_reference_centre_and_adapters_are_the_same_on_two_ranks(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    alone = steps(model, 1, tmp_path / "one", sections=EVERYTHING)
    together = steps(model, 2, tmp_path / "two", sections=EVERYTHING)
    assert close(alone["steps"], together["steps"], 1e-4)
    assert close(alone["logprobs"], together["logprobs"], 1e-4)
    assert any("lora_A" in name for name in alone["weights"]), "adapters alone are published from any number of ranks"
    assert close(alone["weights"], together["weights"], 1e-3)
    resumed = steps(model, 1, tmp_path / "resumed", tmp_path / "two/state", EVERYTHING)
    spread = steps(model, 2, tmp_path / "spread", tmp_path / "one/state", EVERYTHING)
    assert close(resumed["steps"], spread["steps"], 1e-3)

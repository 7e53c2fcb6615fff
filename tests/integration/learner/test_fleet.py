"""Two ranks compute what one computes, and load what one saved."""

from pathlib import Path

import pytest
from fleet_runs import close, furthest, same_state, steps
from learner_world import tiny_model

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


def test_two_ranks_equal_one_and_checkpoints_change_hands(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    alone = steps(model, 1, tmp_path / "one")
    together = steps(model, 2, tmp_path / "two")
    assert close(alone["steps"], together["steps"], 1e-5)
    assert close(alone["logprobs"], together["logprobs"], 1e-5)
    assert furthest(tmp_path / "one", tmp_path / "two") < 1e-5
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

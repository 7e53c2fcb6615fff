"""verl's FSDP engine with our loss, on gloo, in one process and in two: the torch backend's steps, up to rounding."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fleet_steps
import pytest
import torch
import torch.distributed as dist
from fleet_runs import close, steps
from learner_world import tiny_model
from safetensors.torch import load_file

from openforge.learner.backends.contract import BackendRefused

VERL = {"learner": {"backend": "verl"}}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "default": {},
    "gspo": {"loss": "gspo", "aggregation": "sequence_mean"},
    "cispo": {"loss": "cispo"},
    "everything": {
        "loss": "ppo_clip",
        "objective": "decoupled",
        "correction": "icepop",
        "kl_coefficient": 0.1,
        "aggregation": "episode_mean",
        "mini_batches": 2,
        "epochs": 2,
    },
}


@pytest.fixture(autouse=True)
def _no_group_is_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_model(tmp_path)


def alone(model: Path, out: Path, algorithm: dict[str, Any], more: dict[str, Any], load: str = "") -> dict[str, Any]:
    """The same steps in this process, which has imported verl already."""
    fleet_steps.main(str(model), "1", str(out), json.dumps({"algorithm": algorithm, **more}), load)
    return dict(json.loads((out / "seen.json").read_text()))


def furthest(left: Path, right: Path) -> float:
    """The largest difference between two weights of the same name; the names are the same."""
    ours, theirs = (load_file(folder / "weights.safetensors") for folder in (left, right))
    assert ours.keys() == theirs.keys()
    return max((ours[name] - theirs[name]).abs().max().item() for name in ours)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_losses_gradients_log_probs_and_weights_are_those_of_the_torch_backend(
    model: Path, tmp_path: Path, name: str
) -> None:
    ours = alone(model, tmp_path / "torch", ALGORITHMS[name], {})
    theirs = alone(model, tmp_path / "verl", ALGORITHMS[name], VERL)
    assert close(ours["steps"], theirs["steps"], 1e-5)
    assert close(ours["logprobs"], theirs["logprobs"], 1e-5)
    assert furthest(tmp_path / "torch", tmp_path / "verl") < 1e-5


def test_two_ranks_equal_one_and_their_checkpoint_goes_on_there_alone(model: Path, tmp_path: Path) -> None:
    ours = alone(model, tmp_path / "torch", ALGORITHMS["everything"], {})
    sections = {"algorithm": ALGORITHMS["everything"], **VERL}
    theirs = steps(model, 2, tmp_path / "two", sections=sections)
    assert close(ours["steps"], theirs["steps"], 1e-5)
    assert close(ours["logprobs"], theirs["logprobs"], 1e-5)
    assert furthest(tmp_path / "torch", tmp_path / "two") < 1e-5
    went_on = alone(model, tmp_path / "on", ALGORITHMS["everything"], {}, str(tmp_path / "torch/state"))
    resumed = steps(model, 2, tmp_path / "resumed", tmp_path / "two/state", sections)
    assert close(went_on["steps"], resumed["steps"], 1e-4)
    with pytest.raises(BackendRefused, match=r"2 ranks, and .* set learner\.world_size = 2"):
        alone(model, tmp_path / "one", ALGORITHMS["everything"], VERL, str(tmp_path / "two/state"))


def test_a_checkpoint_goes_on_as_if_nothing_had_happened(model: Path, tmp_path: Path) -> None:
    alone(model, tmp_path / "torch", {}, {})
    alone(model, tmp_path / "verl", {}, VERL)
    expected = alone(model, tmp_path / "torch-on", {}, {}, str(tmp_path / "torch/state"))
    resumed = alone(model, tmp_path / "verl-on", {}, VERL, str(tmp_path / "verl/state"))
    assert close(resumed["steps"], expected["steps"], 1e-5)
    assert furthest(tmp_path / "torch-on", tmp_path / "verl-on") < 1e-5
    saved = torch.load(tmp_path / "verl/state/model_world_size_1_rank_0.pt", weights_only=False)
    assert saved

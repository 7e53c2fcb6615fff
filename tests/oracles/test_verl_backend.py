"""verl's FSDP engine with our loss, on gloo, in one process and in two: the torch backend's steps, up to rounding."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fleet_steps
import pytest
import torch
import torch.distributed as dist
from fleet_runs import close, furthest, same_state, steps
from learner_world import run_config, tiny_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from openforge.learner.backends.loading import as_stored
from openforge.learner.checkpoints import Checkpoint, Checkpoints, Memory
from openforge.learner.plain import policy_of, write_plain
from openforge.models import tiny

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


@pytest.mark.parametrize("name", ALGORITHMS)
def test_losses_gradients_log_probs_and_weights_are_those_of_the_torch_backend(
    model: Path, tmp_path: Path, name: str
) -> None:
    ours = alone(model, tmp_path / "torch", ALGORITHMS[name], {})
    theirs = alone(model, tmp_path / "verl", ALGORITHMS[name], VERL)
    assert close(ours["steps"], theirs["steps"], 1e-5)
    assert close(ours["logprobs"], theirs["logprobs"], 1e-5)
    assert furthest(tmp_path / "torch", tmp_path / "verl") < 1e-5


def test_two_ranks_equal_one_and_go_on_as_the_torch_backend_goes_on(model: Path, tmp_path: Path) -> None:
    ours = alone(model, tmp_path / "torch", ALGORITHMS["everything"], {})
    sections = {"algorithm": ALGORITHMS["everything"], **VERL}
    theirs = steps(model, 2, tmp_path / "two", sections=sections)
    assert close(ours["steps"], theirs["steps"], 1e-5)
    assert close(ours["logprobs"], theirs["logprobs"], 1e-5)
    assert furthest(tmp_path / "torch", tmp_path / "two") < 1e-5
    went_on = alone(model, tmp_path / "on", ALGORITHMS["everything"], {}, str(tmp_path / "torch/state"))
    resumed = steps(model, 2, tmp_path / "resumed", tmp_path / "two/state", sections)
    assert close(went_on["steps"], resumed["steps"], 1e-4)


def test_weights_and_optimizer_are_the_same_bits_however_many_ranks_hold_them(model: Path, tmp_path: Path) -> None:
    steps(model, 2, tmp_path / "two", sections=VERL)
    on_one = alone(model, tmp_path / "one", {}, VERL, str(tmp_path / "two/state"))
    on_two = steps(model, 2, tmp_path / "back", tmp_path / "one/state", VERL)
    assert same_state(tmp_path / "two/state", tmp_path / "one/state")
    assert same_state(tmp_path / "two/state", tmp_path / "back/state")
    assert close(on_one["steps"], on_two["steps"], 1e-4)


def test_what_two_ranks_saved_is_exported_as_a_plain_folder_with_the_weights_that_they_had(
    model: Path, tmp_path: Path
) -> None:
    steps(model, 2, tmp_path / "two", sections=VERL)
    config = run_config(model, "r", learner={"backend": "verl"})
    checkpoint = whole_checkpoint(tmp_path / "checkpoints", tmp_path / "two/state")
    write_plain(policy_of(checkpoint, config), config, tmp_path / "plain", "float32")
    found = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32).named_parameters())
    had = load_file(tmp_path / "two/weights.safetensors")
    assert found.keys() == had.keys()
    assert all(torch.equal(found[name], had[name]) for name in had)
    assert not torch.equal(had["model.norm.weight"], load_file(model / "model.safetensors")["model.norm.weight"])


def whole_checkpoint(root: Path, state: Path) -> Checkpoint:
    checkpoints = Checkpoints(root)
    checkpoints.save(
        Memory(version=3, config_digest="d", batcher=b"", cursors={}),
        lambda folder: shutil.copytree(state, folder, dirs_exist_ok=True) and None,
    )
    return next(checkpoints.newest_first())


def test_a_checkpoint_goes_on_as_if_nothing_had_happened(model: Path, tmp_path: Path) -> None:
    alone(model, tmp_path / "torch", {}, {})
    alone(model, tmp_path / "verl", {}, VERL)
    expected = alone(model, tmp_path / "torch-on", {}, {}, str(tmp_path / "torch/state"))
    resumed = alone(model, tmp_path / "verl-on", {}, VERL, str(tmp_path / "verl/state"))
    assert close(resumed["steps"], expected["steps"], 1e-5)
    assert furthest(tmp_path / "torch-on", tmp_path / "verl-on") < 1e-5
    assert not list((tmp_path / "verl/state").glob("*.pt")), "no pickles of verl's"


def test_a_mixture_of_experts_is_exported_under_the_names_that_the_torch_backend_gives(tmp_path: Path) -> None:
    model = tiny(tmp_path / "mixture", hidden=32, heads=2, kv_heads=1, experts=8)
    ours = alone(model, tmp_path / "torch", {}, {})
    theirs = alone(model, tmp_path / "verl", {}, VERL)
    assert close(ours["steps"], theirs["steps"], 1e-5)
    assert close(ours["logprobs"], theirs["logprobs"], 1e-5)
    assert furthest(tmp_path / "torch", tmp_path / "verl") < 1e-5
    stored = as_stored(str(model), load_file(tmp_path / "verl/weights.safetensors"))
    assert stored.keys() == load_file(model / "model.safetensors").keys(), "published as the checkpoint names them"

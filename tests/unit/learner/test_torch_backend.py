"""The torch backend in one process: what a step does to the weights, and what it does not."""

from pathlib import Path

import pytest
import torch
from learner_world import run_config, tiny_model, verdict

from openforge.learner.backends.choose import backend_for
from openforge.learner.backends.contract import BackendRefused
from openforge.learner.backends.torch_fsdp import TorchBackend, learning_rate
from openforge.learner.step import Step, batch_of, step_of
from openforge.protos import TrajectoryVerified
from openforge.runs import RunConfig


def step(config: RunConfig, backend: TorchBackend, trajectories: list[TrajectoryVerified], base: int = 0) -> Step:
    groups = list(dict.fromkeys(one.group for one in trajectories))
    batch = batch_of(base, groups, {one.episode: one for one in trajectories}, 0)
    return step_of(batch, config.algorithm, backend.vocabulary)


def batch(config: RunConfig, first: int = 0) -> list[TrajectoryVerified]:
    return [verdict(config, ordinal, member, 0) for ordinal in (first, first + 1) for member in range(4)]


def weights(backend: TorchBackend) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in backend.export().items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return run_config(tiny_model(tmp_path))


def test_a_batch_of_equal_rewards_is_a_step_with_zero_gradient(config: RunConfig) -> None:
    backend = TorchBackend(config)
    before = weights(backend)
    stats = backend.train(step(config, backend, [verdict(config, 0, m, 0, reward=1.0) for m in range(4)]).sequences, 0)
    assert (stats.grad_norm, stats.loss_tokens, stats.forwarded_tokens) == (0.0, 0, 0)
    assert same(before, weights(backend))


def test_groups_without_variance_only_thin_the_gradient(config: RunConfig) -> None:
    lively = batch(config)
    silent = [verdict(config, 9, member, 0, reward=0.0) for member in range(4)]
    alone, mixed = TorchBackend(config), TorchBackend(config)
    norm = alone.train(step(config, alone, lively).sequences, 0).grad_norm
    thinned = step(config, mixed, [*lively, *silent])
    share = step(config, mixed, lively).loss_tokens / thinned.loss_tokens
    assert mixed.train(thinned.sequences, 0).grad_norm == pytest.approx(norm * share, rel=1e-4)


def test_rows_do_not_change_the_step(config: RunConfig, tmp_path: Path) -> None:
    narrow = run_config(tmp_path / "model", learner={"row_tokens": 24, "backend_options": {"fill_tokens": 1}})
    one, many = TorchBackend(config), TorchBackend(narrow)
    wide_stats = one.train(step(config, one, batch(config)).sequences, 0)
    narrow_stats = many.train(step(narrow, many, batch(narrow)).sequences, 0)
    assert narrow_stats.rows > wide_stats.rows
    assert narrow_stats.loss == pytest.approx(wide_stats.loss, rel=1e-5)
    assert narrow_stats.grad_norm == pytest.approx(wide_stats.grad_norm, rel=1e-5)


def test_a_checkpoint_continues_bit_for_bit(config: RunConfig, tmp_path: Path) -> None:
    through, resumed = TorchBackend(config), TorchBackend(config)
    through.train(step(config, through, batch(config)).sequences, 0)
    (tmp_path / "state").mkdir()
    through.save(tmp_path / "state")
    resumed.load(tmp_path / "state")
    assert same(weights(through), weights(resumed))
    for backend in (through, resumed):
        backend.train(step(config, backend, batch(config, 5)).sequences, 1)
    assert same(weights(through), weights(resumed))


def test_the_learning_rate_warms_up(tmp_path: Path) -> None:
    config = run_config(tiny_model(tmp_path), learner={"warmup_steps": 4, "learning_rate": 8e-3})
    backend = TorchBackend(config)
    seen = [
        backend.train(step(config, backend, batch(config, base)).sequences, base).learning_rate for base in range(6)
    ]
    assert seen == pytest.approx([2e-3, 4e-3, 6e-3, 8e-3, 8e-3, 8e-3])


def test_the_learning_rate_falls_to_nothing(tmp_path: Path) -> None:
    settings = run_config(tmp_path, learner={"warmup_steps": 2, "decay_steps": 6, "learning_rate": 8e-3}).learner
    rates = [learning_rate(settings, step) for step in range(7)]
    assert rates == pytest.approx([4e-3, 8e-3, 8e-3, 6e-3, 4e-3, 2e-3, 0])


def test_verl_is_refused_with_the_field_and_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(BackendRefused, match=r"learner\.backend = 'verl' .* use learner\.backend = 'torch'"):
        backend_for(run_config(tmp_path, learner={"backend": "verl"}))


def test_unknown_backend_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BackendRefused, match="colour"):
        backend_for(run_config(tmp_path, learner={"backend_options": {"colour": "red"}}))

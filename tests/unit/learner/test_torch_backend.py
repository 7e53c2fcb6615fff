"""The torch backend in one process: what a step does to the weights, and what it does not."""

from pathlib import Path
from typing import Literal

import msgspec
import pytest
import reference_losses
import torch
from learner_world import run_config, tiny_model, verdict

from openforge.engine.loading import load
from openforge.engine.probe import TOLERANCE
from openforge.learner.backends.choose import backend_for
from openforge.learner.backends.contract import BackendRefused
from openforge.learner.backends.torch_fsdp import TorchBackend
from openforge.learner.backends.trained import learning_rate
from openforge.learner.publisher import Publisher
from openforge.learner.step import Step, batch_of, step_of
from openforge.protos import PolicyPublished, Span, TrajectoryVerified, pack_logprobs, unpack_logprobs
from openforge.runs import RunConfig
from openforge.weights import Written


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


def test_one_row_and_several_have_the_same_gradient_in_every_weight(config: RunConfig, tmp_path: Path) -> None:
    """Where the mean was taken over each row by itself, ragged answers would weigh by the row that they are in."""
    rows, gradients = list[int](), list[list[torch.Tensor]]()
    for row_tokens in (256, 40, 28, 22):
        options = {"fill_tokens": row_tokens}
        learner = {"row_tokens": row_tokens, "gradient_clip": 0.0, "backend_options": options}
        cut = run_config(tmp_path / "model", learner=learner)
        backend = TorchBackend(cut)
        rows.append(backend.train(step(cut, backend, batch(cut)).sequences, 0).rows)
        gradients.append([parameter.grad for parameter in backend.trained.parameters])
    assert rows == [1, 2, 4, 5]
    for others in gradients[1:]:
        for found, expected in zip(others, gradients[0], strict=True):
            assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


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
    settings = {"warmup_steps": 2, "decay_steps": 6, "learning_rate": 8e-3}
    config = run_config(tmp_path, learner=settings)
    rates = [learning_rate(config.learner, config.learner.learning_rate, step) for step in range(7)]
    assert rates == pytest.approx([4e-3, 8e-3, 8e-3, 6e-3, 4e-3, 2e-3, 0])


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({}, r"learner\.backend = 'verl' needs verl 0\.9\.1, .* `make verl`"),
        ({"learner": {"lora": {"rank": 4}}}, r"learner\.lora\.rank = 4: .* rank = 0"),
        ({"algorithm": {"advantage": "gae"}}, r"algorithm\.advantage = 'gae': .* no critic"),
        ({"learner": {"backend_options": {"engine": "megatron"}}}, "needs CUDA devices"),
        ({"learner": {"backend_options": {"tensor_parallel": 2}}}, "write engine = 'megatron'"),
        ({"learner": {"backend_options": {"engine": "deepspeed"}}}, "there are engine, attention"),
    ],
)
def test_what_verl_cannot_do_is_refused_with_the_field_and_the_way_out(
    tmp_path: Path, sections: dict[str, dict[str, object]], said: str
) -> None:
    learner = {**sections.get("learner", {}), "backend": "verl"}
    with pytest.raises(BackendRefused, match=said):
        backend_for(run_config(tmp_path, **{**sections, "learner": learner}))


def test_torchrun_that_would_start_ranks_again_with_the_store_of_the_dead_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {"WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3"}
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BackendRefused, match="set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        backend_for(run_config(tiny_model(tmp_path), learner={"world_size": 2}))


def test_unknown_backend_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BackendRefused, match="colour"):
        backend_for(run_config(tmp_path, learner={"backend_options": {"colour": "red"}}))


EVERYTHING = {
    "advantage": "gae",
    "loss": "ppo_clip",
    "objective": "decoupled",
    "kl_coefficient": 0.1,
    "mini_batches": 2,
    "epochs": 2,
    "gae_lambda": 0.95,
}
LORA = {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "v_proj", "down_proj"]}


@pytest.mark.parametrize("lora", [{}, LORA], ids=["all weights", "adapters"])
def test_a_checkpoint_with_critic_and_reference_continues_bit_for_bit(tmp_path: Path, lora: dict[str, object]) -> None:
    config = run_config(tiny_model(tmp_path), algorithm=EVERYTHING, learner={"lora": lora})
    through, resumed = TorchBackend(config), TorchBackend(config)
    through.train(step(config, through, batch(config)).sequences, 0)
    (tmp_path / "state").mkdir()
    through.save(tmp_path / "state")
    resumed.load(tmp_path / "state")
    seen = [backend.train(step(config, backend, batch(config, 5)).sequences, 1) for backend in (through, resumed)]
    assert same(weights(through), weights(resumed))
    assert seen[0] == seen[1]
    assert seen[0].critic_loss > 0
    assert seen[0].reference_kl != 0


def test_the_critic_learns_what_to_expect(tmp_path: Path) -> None:
    config = run_config(
        tiny_model(tmp_path), algorithm={**EVERYTHING, "kl_coefficient": 0.0}, learner={"critic_learning_rate": 3e-3}
    )
    backend = TorchBackend(config)
    made = step(config, backend, batch(config))
    first, *_, last = [backend.train(made.sequences, base) for base in range(8)]
    assert first.explained_variance == pytest.approx(0.0, abs=1e-9)
    assert last.critic_loss < first.critic_loss
    assert last.explained_variance > 0.3


def test_before_its_first_step_the_learner_is_its_own_centre_and_its_own_reference(tmp_path: Path) -> None:
    algorithm = {"loss": "ppo_clip", "objective": "decoupled", "kl_coefficient": 0.1, "correction": "icepop"}
    config = run_config(tiny_model(tmp_path), algorithm=algorithm)
    backend = TorchBackend(config)
    made = step(config, backend, batch(config))
    (rows,) = [backend._measured([one for one in made.sequences if one.advantage])]
    for measured in rows:
        row = measured.tensors(backend.device)
        assert torch.equal(backend.policy(row), measured.proximal_N)
        assert torch.equal(measured.reference_N, measured.proximal_N)
    stats = backend.train(made.sequences, 0)
    assert (stats.clipped_low, stats.clipped_high, stats.reference_kl) == (0.0, 0.0, 0.0)
    assert 0 < stats.weight_zero < 1  # what was sampled is made up, so many ratios are out of the band


def test_the_centre_stays_while_the_policy_moves_over_mini_batches_and_epochs(tmp_path: Path) -> None:
    algorithm = {"loss": "ppo_clip", "objective": "decoupled", "correction": "none", "epochs": 3}
    config = run_config(tiny_model(tmp_path), algorithm=algorithm, learner={"learning_rate": 1e-2})
    backend, plain = TorchBackend(config), TorchBackend(config)
    made = step(config, backend, batch(config))
    before = backend.logprobs(made.sequences)
    backend.train(made.sequences, 0)
    algorithm = config.algorithm
    for _ in range(3):  # the same three steps by hand, against the log-probs before the first
        moved = [
            msgspec.structs.replace(one, mu_logprobs_K=centre)
            for one, centre in zip(made.sequences, before, strict=True)
        ]
        plain.algorithm = msgspec.structs.replace(algorithm, objective="bypass", epochs=1)
        plain.train(moved, 0)
    for name, tensor in backend.export().items():
        assert torch.allclose(tensor, plain.export()[name], atol=1e-6)


def test_the_pull_of_the_reference_reaches_groups_without_variance(tmp_path: Path) -> None:
    config = run_config(
        tiny_model(tmp_path), algorithm={"kl_coefficient": 0.5, "kl_estimator": "k2"}, learner={"learning_rate": 1e-4}
    )
    backend = TorchBackend(config)
    silent = [verdict(config, 0, member, 0, reward=1.0) for member in range(4)]
    assert backend.train(step(config, backend, silent).sequences, 0).grad_norm == pytest.approx(0.0, abs=1e-6)
    with torch.no_grad():
        for parameter in backend.policy.parameters():
            parameter.mul_(1.05)
    away = backend.train(step(config, backend, silent).sequences, 1)
    assert away.grad_norm > 1e-4
    assert away.reference_kl > 0
    again = backend.train(step(config, backend, silent).sequences, 2)
    assert again.reference_kl < away.reference_kl


@pytest.mark.parametrize(
    "algorithm",
    [
        {"loss": "gspo", "aggregation": "sequence_mean", "clip_low": 3e-4, "clip_high": 4e-4},
        {"loss": "ppo_clip", "objective": "decoupled", "correction": "sequence_tis", "aggregation": "episode_mean"},
        {"advantage": "gae", "loss": "ppo_clip", "aggregation": "constant", "horizon": 8},
    ],
    ids=["gspo", "decoupled", "critic"],
)
def test_rows_do_not_change_what_looks_at_whole_sequences(tmp_path: Path, algorithm: dict[str, object]) -> None:
    model = tiny_model(tmp_path)
    wide = run_config(model, algorithm=algorithm)
    narrow = run_config(model, algorithm=algorithm, learner={"row_tokens": 24, "backend_options": {"fill_tokens": 1}})
    found = []
    for config in (wide, narrow):
        backend = TorchBackend(config)
        found.append(backend.train(step(config, backend, batch(config)).sequences, 0))
    assert found[1].rows > found[0].rows
    assert found[1].loss == pytest.approx(found[0].loss, rel=1e-4, abs=1e-6)
    assert found[1].grad_norm == pytest.approx(found[0].grad_norm, rel=1e-4)
    assert found[1].critic_grad_norm == pytest.approx(found[0].critic_grad_norm, rel=1e-4)


def test_the_backends_loss_is_the_formula_over_its_own_log_probs(tmp_path: Path) -> None:
    algorithm = {"loss": "ppo_clip", "dual_clip": 3.0, "aggregation": "episode_mean"}
    config = run_config(tiny_model(tmp_path), algorithm=algorithm)
    backend = TorchBackend(config)
    made = step(config, backend, [verdict(config, 0, member, 0, reward=float(member)) for member in range(4)])
    formula, expected = reference_losses.ppo(0.2, 0.28, 3.0), 0.0
    for one, pi in zip(made.sequences, backend.logprobs(made.sequences), strict=True):
        case = reference_losses.Case(one.mu_logprobs_K, one.mu_logprobs_K, [], [one.advantage] * len(pi), [])
        expected += one.weight * sum(formula(pi, pi, case))
    assert backend.train(made.sequences, 0).loss == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_a_tool_token_in_the_middle_is_in_no_count_and_in_no_loss(tmp_path: Path) -> None:
    config = run_config(tiny_model(tmp_path), algorithm={"loss": "ppo_clip"})
    backend = TorchBackend(config)
    members = [verdict(config, 0, member, 0, reward=float(member)) for member in range(4)]
    made = step(config, backend, [_with_a_hole(one) for one in members])
    loss_tokens = sum(len(unpack_logprobs(one.sequences[0].logprobs)) - 1 for one in members)
    formula, expected = reference_losses.ppo(0.2, 0.28, 0.0), 0.0
    for one, pi in zip(made.sequences, backend.logprobs(made.sequences), strict=True):
        case = reference_losses.Case(one.mu_logprobs_K, one.mu_logprobs_K, [], [one.advantage] * len(pi), [])
        expected += sum(formula(pi, pi, case)) / loss_tokens
    stats = backend.train(made.sequences, 0)
    assert stats.loss_tokens == loss_tokens
    assert stats.loss == pytest.approx(expected, rel=1e-5, abs=1e-5)


def _with_a_hole(one: TrajectoryVerified) -> TrajectoryVerified:
    """Its second answer token as if a tool had said it."""
    (sequence,) = one.sequences
    (span,), (told, _, *more) = sequence.loss, unpack_logprobs(sequence.logprobs)
    loss = (Span(span.start, 1), Span(span.start + 2, span.length - 2))
    holed = msgspec.structs.replace(sequence, loss=loss, logprobs=pack_logprobs([told, *more]))
    return msgspec.structs.replace(one, sequences=(holed,))


def test_adapters_start_without_effect_and_are_published_merged(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    config, plain = run_config(model, learner={"lora": LORA}), run_config(model)
    backend, untouched = TorchBackend(config), TorchBackend(plain)
    assert same(weights(backend), weights(untouched))
    made = step(config, backend, batch(config))
    backend.train(made.sequences, 0)
    exported = weights(backend)
    changed = {name for name in exported if not torch.equal(exported[name], weights(untouched)[name])}
    assert changed == {name for name in exported if any(target in name for target in LORA["targets"])}  # type: ignore[union-attr]
    with torch.no_grad():
        for name, parameter in untouched.policy.model.named_parameters():
            parameter.copy_(exported[name])
    for left, right in zip(backend.logprobs(made.sequences), untouched.logprobs(made.sequences), strict=True):
        assert left == pytest.approx(right, abs=1e-5)
    assert set(backend.plain_model().state_dict()) == set(untouched.policy.model.state_dict())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_are_published_alone_and_an_engine_computes_with_them_what_the_learner_stated(
    tmp_path: Path, dtype: Literal["float32", "bfloat16"]
) -> None:
    config = run_config(tiny_model(tmp_path), learner={"lora": LORA, "learning_rate": 1e-2})
    config = msgspec.structs.replace(config, engine=msgspec.structs.replace(config.engine, dtype=dtype))
    backend = TorchBackend(config)
    publisher = Publisher(backend, config, tmp_path / "weights")
    first = publisher.write(0, 0, "")
    backend.train(step(config, backend, batch(config)).sequences, 0)
    second = publisher.write(1, 0, first.digest)
    assert second.bytes * 10 < sum(file.stat().st_size for file in (tmp_path / "weights/base").iterdir())
    for written in (first, second):
        loaded = load(written.path, dtype, digest=written.digest)
        assert loaded.probe_error < TOLERANCE[dtype]
    told = [fact(number, written) for number, written in enumerate((first, second))]
    again = Publisher(backend, config, tmp_path / "weights")
    assert [again.holds(one) for one in told] == [False, True]
    merged = msgspec.structs.replace(config, engine=msgspec.structs.replace(config.engine, lora="merged"))
    whole = Publisher(backend, merged, tmp_path / "weights")
    assert not whole.holds(told[1])
    plain = whole.write(1, 1, first.digest)
    assert load(plain.path, dtype, digest=plain.digest).probe_error < TOLERANCE[dtype]


def fact(version: int, written: Written) -> PolicyPublished:
    return PolicyPublished(
        run="r", version=version, incarnation=0, location=str(written.path), digest=written.digest, bytes=written.bytes
    )


def test_without_its_adapters_the_policy_is_the_first_one(tmp_path: Path) -> None:
    algorithm = {"kl_coefficient": 0.1}
    config = run_config(tiny_model(tmp_path), algorithm=algorithm, learner={"lora": {"rank": 4}, "learning_rate": 1e-2})
    backend = TorchBackend(config)
    made = step(config, backend, batch(config))
    first = backend._measured(list(made.sequences))
    backend.train(made.sequences, 0)
    later = backend._measured(list(made.sequences))
    for before, after in zip(first, later, strict=True):
        assert torch.equal(before.reference_N, after.reference_N)
        assert not torch.equal(backend.policy(after.tensors(backend.device)), after.reference_N)


def test_layers_that_are_not_there_cannot_be_adapted(tmp_path: Path) -> None:
    with pytest.raises(BackendRefused, match=r"learner\.lora\.targets = \['nowhere'\]"):
        TorchBackend(run_config(tiny_model(tmp_path), learner={"lora": {"rank": 4, "targets": ["nowhere"]}}))


def test_fused_kernels_are_refused_where_there_is_no_cuda(tmp_path: Path) -> None:
    options = {"liger": True, "device": "cpu"}
    with pytest.raises(BackendRefused, match="need a CUDA device"):
        TorchBackend(run_config(tiny_model(tmp_path), learner={"backend_options": options}))


def test_recomputed_activations_give_the_same_step(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    found = []
    for recompute in (False, True):
        config = run_config(model, learner={"backend_options": {"recompute": recompute}})
        backend = TorchBackend(config)
        found.append(backend.train(step(config, backend, batch(config)).sequences, 0))
    assert found[0].grad_norm == pytest.approx(found[1].grad_norm, rel=1e-6)

"""Tokens are trained through the experts that they were sampled through."""

import io
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from learner_world import run_config, tiny_model
from mixtures import EXPERTS, PROMPT, episodes, mixture, npy, unchosen
from safetensors.torch import load_file

from openforge.blobs import DirectoryBlobs, ref_to
from openforge.engine.loading import load
from openforge.engine.probe import TOLERANCE
from openforge.learner.backends import replay
from openforge.learner.backends.choose import backend_for
from openforge.learner.backends.contract import BackendRefused
from openforge.learner.backends.loading import as_computed, as_stored
from openforge.learner.backends.torch_fsdp import TorchBackend
from openforge.learner.identity import decisive, training_digest
from openforge.learner.lineage import ExpertsLost, LineageBroken, recorded_replay_of, replay_of
from openforge.learner.packing import TrainSequence, pack
from openforge.learner.publisher import Publisher
from openforge.learner.routing import NONE, Mixture, Replay, Routing
from openforge.learner.step import Step, batch_of, step_of
from openforge.learner.trajectories import header_of
from openforge.protos import Span, TrajectoryVerified, pack_logprobs, unpack_logprobs
from openforge.runs import RunConfig

HERE = Mixture(layers=2, experts=EXPERTS, per_token=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixture(tmp_path_factory.mktemp("models") / "mixture")


@pytest.fixture(scope="module")
def config(model: Path) -> RunConfig:
    return run_config(model, learner={"routing_replay": True})


@pytest.fixture(scope="module")
def group(config: RunConfig, model: Path) -> tuple[list[TrajectoryVerified], dict[str, bytes]]:
    return episodes(config, model)


def _step(
    config: RunConfig, members: list[TrajectoryVerified], files: dict[str, bytes], mixture: Mixture = HERE
) -> Step:
    batch = batch_of(0, [members[0].group], {one.episode: one for one in members}, 0)
    return step_of(batch, config.algorithm, 259, Replay(mixture, files))


def _unlike(backend: TorchBackend, files: dict[str, bytes]) -> None:
    """Make the routers prefer, for about half of all tokens, experts that none of the recorded ones went through."""
    drawn = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer, block in enumerate(backend.policy.model.model.layers):
            for expert in unchosen(files, layer):
                block.mlp.gate.weight[expert] = 30.0 * torch.randn(32, generator=drawn)


def _gap(told: list[list[float]], sequences: tuple[TrainSequence, ...]) -> float:
    return max(
        abs(ours - theirs)
        for ours_K, one in zip(told, sequences, strict=True)
        for ours, theirs in zip(ours_K, one.mu_logprobs_K, strict=True)
    )


def test_log_probs_are_the_recorded_ones_although_the_router_would_now_choose_others(
    config: RunConfig, group: tuple[list[TrajectoryVerified], dict[str, bytes]]
) -> None:
    members, files = group
    assert all(unchosen(files, layer) for layer in range(2))
    made = _step(config, members, files)
    backend = TorchBackend(config)
    assert made.metrics["routing_replayed"] == 1.0
    assert _gap(backend.logprobs(made.sequences), made.sequences) < 1e-4
    _unlike(backend, files)
    assert _gap(backend.logprobs(made.sequences), made.sequences) < 1e-3
    alone = tuple(msgspec.structs.replace(one, routing=None) for one in made.sequences)
    assert _gap(backend.logprobs(alone), alone) > 0.1, "left to itself the router sends them elsewhere"


@pytest.mark.parametrize("recompute", [False, True])
def test_the_gradient_reaches_the_routers_at_the_experts_that_were_replayed_and_at_no_others(
    model: Path, group: tuple[list[TrajectoryVerified], dict[str, bytes]], recompute: bool
) -> None:
    members, files = group
    options = {"backend_options": {"recompute": recompute}, "routing_replay": True, "learning_rate": 1e-6}
    config = run_config(model, learner=options)
    backend = TorchBackend(config)
    _unlike(backend, files)
    before = {name: tensor.clone() for name, tensor in as_stored(str(model), backend.export()).items()}
    stats = backend.train(_step(config, members, files).sequences, 0)
    assert stats.gap_max < 1e-3
    after = as_stored(str(model), backend.export())
    for layer in range(2):
        router, experts = f"model.layers.{layer}.mlp.gate.weight", f"model.layers.{layer}.mlp.experts"
        moved = (after[router] != before[router]).any(1)
        beside = unchosen(files, layer)
        assert not moved[beside].any()
        assert moved[[expert for expert in range(EXPERTS) if expert not in beside]].any()
        for expert in beside:
            name = f"{experts}.{expert}.down_proj.weight"
            assert torch.equal(after[name], before[name])


def test_recomputed_activations_go_through_the_same_experts(
    model: Path, group: tuple[list[TrajectoryVerified], dict[str, bytes]]
) -> None:
    members, files = group
    norms = []
    for recompute in (False, True):
        options = {"backend_options": {"recompute": recompute}, "routing_replay": True}
        backend = TorchBackend(run_config(model, learner=options))
        _unlike(backend, files)
        norms.append(backend.train(_step(backend.config, members, files).sequences, 0).grad_norm)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_a_trained_mixture_is_published_as_its_checkpoint_and_served(
    config: RunConfig, model: Path, group: tuple[list[TrajectoryVerified], dict[str, bytes]], tmp_path: Path
) -> None:
    from safetensors import safe_open

    members, files = group
    backend = TorchBackend(config)
    backend.train(_step(config, members, files).sequences, 0)
    written = Publisher(backend, config, tmp_path / "weights").write(1, 0, "")
    with safe_open(model / "model.safetensors", "pt") as file:
        assert as_stored(str(model), backend.export()).keys() == set(file.keys())
    assert load(Path(written.path), "float32", digest=written.digest).probe_error < TOLERANCE["float32"]


def test_adapters_train_the_attention_of_a_mixture_and_are_served(
    model: Path, group: tuple[list[TrajectoryVerified], dict[str, bytes]], tmp_path: Path
) -> None:
    members, files = group
    with pytest.raises(BackendRefused, match=r"would adapt experts.*q_proj"):
        TorchBackend(run_config(model, learner={"lora": {"rank": 4}}))
    lora = {"rank": 4, "targets": ["q_proj", "k_proj", "v_proj", "o_proj"]}
    config = run_config(model, learner={"routing_replay": True, "lora": lora, "learning_rate": 1e-2})
    backend = TorchBackend(config)
    backend.train(_step(config, members, files).sequences, 0)
    written = Publisher(backend, config, tmp_path / "weights").write(1, 0, "")
    assert load(Path(written.path), "float32", digest=written.digest).probe_error < TOLERANCE["float32"]


def test_rows_hold_what_the_first_sequence_that_knows_tells_of_a_shared_token() -> None:
    def one(ids: list[int], told: dict[int, int]) -> TrainSequence:
        rows = np.full((len(ids), 2, 2), NONE, np.int16)
        for at, value in told.items():
            rows[at] = value
        loss = list(range(4, len(ids)))
        return TrainSequence(
            ids_T=ids,
            at_K=loss,
            mu_logprobs_K=[-1.0] * len(loss),
            advantage=1.0,
            weight=0.1,
            temperature=1.0,
            routing=Routing(rows.tobytes(), 2, 2),
        )

    sequences = [
        one([5, 6, 7, 8, 1, 1, 1], {0: 10, 1: 11, 4: 14, 5: 15}),
        one([5, 6, 7, 8, 2, 2], {0: 20, 2: 22, 4: 24}),
        one([5, 6, 7, 8, 3, 3], {3: 33, 4: 34}),
        msgspec.structs.replace(one([5, 6, 9, 9, 9, 9], {}), routing=None),
    ]
    (row,) = pack(sequences, 64)
    assert row.routing is not None
    rows = row.routing.rows()
    assert bool((rows == rows[:, :1, :1]).all())
    told = [(token, int(value)) for token, value in zip(row.ids_T, rows[:, 0, 0], strict=True)]
    assert told == [(5, 10), (6, 11), (7, 22), (8, 33), (1, 14), (1, 15), (2, 24), (3, 34), (9, -1), (9, -1), (9, -1)]


def test_a_group_shares_its_prompt_and_has_the_log_probs_of_each_member_alone(
    config: RunConfig, group: tuple[list[TrajectoryVerified], dict[str, bytes]]
) -> None:
    members, files = group
    sequences = _step(config, members, files).sequences
    backend = TorchBackend(config)
    _unlike(backend, files)
    (row,) = pack(sequences, 256)
    assert len(row.ids_T) < sum(one.at_K[-1] for one in sequences) - 2 * len(PROMPT)
    together = backend.logprobs(sequences)
    for told, one in zip(together, sequences, strict=True):
        assert backend.logprobs([one])[0] == pytest.approx(told, abs=1e-5)


def test_what_tells_of_another_model_or_of_too_few_tokens_is_not_replayed(
    config: RunConfig, group: tuple[list[TrajectoryVerified], dict[str, bytes]]
) -> None:
    members, files = group
    (member, *_) = members
    (sequence,) = member.sequences
    (ref,), (at,) = sequence.routed_experts, sequence.routed_at
    rows = np.load(io.BytesIO(files[ref.digest]))
    others = [npy(rows[:, :1]), npy(rows[:-1]), npy(np.full_like(rows, EXPERTS)), b"no file"]
    for other in others:
        told = msgspec.structs.replace(sequence, routed_experts=(ref_to(other), ref), routed_at=(at, Span(0, 10)))
        changed = msgspec.structs.replace(member, sequences=(told,))
        (made, *_) = _step(config, [changed, *members[1:]], files | {ref_to(other).digest: other}).sequences
        assert made.routing is not None
        assert (made.routing.rows()[:10] == rows[:10]).all()
        assert (made.routing.rows()[10:] == NONE).all()


def test_a_backend_of_wholes_replays_no_sequence_of_which_a_token_is_unknown_that_comes_before_its_last_trained_one(
    config: RunConfig, group: tuple[list[TrajectoryVerified], dict[str, bytes]]
) -> None:
    members, files = group
    whole = msgspec.structs.replace(HERE, whole=True)
    made = _step(config, members, files, whole)
    assert all(one.routing is not None and len(one.routing.rows()) == one.at_K[-1] for one in made.sequences)
    assert made.metrics["routing_replayed"] == 1.0, "the last token sampled is never computed"
    (sequence,) = members[0].sequences
    (at,) = sequence.routed_at
    for missing, replayed in ((Span(0, at.length - 1), False), (Span(1, at.length - 1), False), (at, True)):
        told = msgspec.structs.replace(members[0], sequences=(msgspec.structs.replace(sequence, routed_at=(missing,)),))
        made = _step(config, [told, *members[1:]], files, whole)
        assert [one.routing is not None for one in made.sequences] == [replayed, True, True, True]
        assert made.metrics["routing_replayed"] == pytest.approx(1.0 if replayed else 0.75)
    earlier = msgspec.structs.replace(sequence.versions[0], length=sequence.versions[0].length - 3)
    shorter = msgspec.structs.replace(
        sequence,
        loss=(Span(earlier.start, earlier.length),),
        logprobs=pack_logprobs(unpack_logprobs(sequence.logprobs)[:-3]),
        versions=(earlier,),
        routed_at=(Span(0, at.length - 3),),
    )
    told = msgspec.structs.replace(members[0], sequences=(shorter,))
    assert _step(config, [told, *members[1:]], files, whole).metrics["routing_replayed"] == 1.0, (
        "what follows is context"
    )


def test_spans_that_lie_outside_make_a_trajectory_unsound(
    group: tuple[list[TrajectoryVerified], dict[str, bytes]],
) -> None:
    (member, *_), _ = group
    (sequence,) = member.sequences
    assert header_of(member, 259).unsound == ""
    for spans in ((Span(0, 99),), (Span(-1, 4),), ()):
        told = msgspec.structs.replace(member, sequences=(msgspec.structs.replace(sequence, routed_at=spans),))
        assert "experts" in header_of(told, 259).unsound


async def test_a_batch_whose_files_are_gone_is_not_trained_otherwise(
    group: tuple[list[TrajectoryVerified], dict[str, bytes]], tmp_path: Path
) -> None:
    members, files = group
    batch = batch_of(4, [members[0].group], {one.episode: one for one in members}, 0)
    blobs = DirectoryBlobs(str(tmp_path))
    refs = [await blobs.put(file) for file in files.values()]
    assert await replay_of(blobs, HERE, batch) == Replay(HERE, files)
    assert await replay_of(blobs, None, batch) is None
    await blobs.delete(refs[0])
    with pytest.raises(ExpertsLost, match=rf"^{members[0].episode}: .*{refs[0].digest} is not in") as lost:
        await replay_of(blobs, HERE, batch)
    assert lost.value.groups.keys() == {members[0].group}
    with pytest.raises(
        LineageBroken, match=r"version 4 is recorded and cannot be computed again: .*; restore the blobs"
    ):
        await recorded_replay_of(blobs, HERE, batch)


def test_a_model_without_experts_and_verl_are_refused_with_the_way_out(tmp_path: Path) -> None:
    asked = {"routing_replay": True}
    with pytest.raises(BackendRefused, match=r"learner.routing_replay = true: .*'llama' has no router"):
        backend_for(run_config(tiny_model(tmp_path), learner=asked))
    with pytest.raises(BackendRefused, match=r"learner.routing_replay = true: verl's"):
        backend_for(run_config(tiny_model(tmp_path), learner=asked | {"backend": "verl"}))


_SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _small(kind: str, **more: object) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**(_SMALL | more))
    model = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


KINDS = pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("Qwen3Moe", {"num_experts": 8, "moe_intermediate_size": 16, "head_dim": 16}),
        ("Qwen2Moe", {"num_experts": 8, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}),
        ("Mixtral", {"num_local_experts": 8}),
        ("Olmoe", {"num_experts": 8}),
    ],
)


@KINDS
def test_a_model_that_is_told_its_own_choice_says_the_same_and_other_experts_change_what_follows(
    kind: str, more: dict[str, object]
) -> None:
    model, own = _small(kind, **more), list[torch.Tensor]()
    assert replay.equip(model) == Mixture(layers=2, experts=8, per_token=2)
    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(lambda module, args, said: own.append(said[2]))
    ids = torch.arange(3, 23)[None]
    with torch.no_grad():
        left_alone = model(input_ids=ids).logits[0]
        chosen = torch.stack(own, 1).to(torch.int16)
        half, others = chosen.clone(), chosen.clone()
        half[::2] = NONE
        others[5:] = (others[5:] + 1) % 8
        for known in (chosen, half):
            assert torch.allclose(model(input_ids=ids, routed_experts=known).logits[0], left_alone, atol=1e-4)
        elsewhere = model(input_ids=ids, routed_experts=others).logits[0]
        assert torch.allclose(elsewhere[:5], left_alone[:5], atol=1e-4)
        assert bool(((elsewhere[5:] - left_alone[5:]).abs().amax(-1) > 1e-2).all())


@KINDS
def test_what_a_checkpoint_names_and_cuts_otherwise_is_the_models_parameters_again(
    kind: str, more: dict[str, object], tmp_path: Path
) -> None:
    model, folder = _small(kind, **more), str(tmp_path)
    model.save_pretrained(folder)
    own = {name: parameter.detach() for name, parameter in model.named_parameters()}
    stored = as_stored(folder, own)
    assert stored.keys() == load_file(tmp_path / "model.safetensors").keys() != own.keys()
    assert any(".experts.7." in name for name in stored)
    for name, tensor in as_computed(folder, {name: tensor * 2 for name, tensor in stored.items()}).items():
        assert torch.equal(tensor, own.pop(name) * 2), "not what lies in the folder"
    assert not own
    del stored[next(name for name in stored if ".experts.7." in name)]
    with pytest.raises(RuntimeError):
        as_computed(folder, stored)


def test_routers_that_weigh_otherwise_are_refused() -> None:
    model = _small("Qwen3Moe", num_experts=8, moe_intermediate_size=16, head_dim=16)
    router = model.model.layers[1].mlp.gate
    router.register_forward_hook(lambda module, args, said: (said[0], said[1] * 2.5, said[2]))
    with pytest.raises(BackendRefused, match=r"Qwen3MoeTopKRouter does not weigh experts by a softmax"):
        replay.equip(model)


def test_a_run_from_before_there_was_any_goes_on(model: Path) -> None:
    """The digest that such a run's batches carry does not know the setting."""
    plain, replaying = run_config(model), run_config(model, learner={"routing_replay": True})
    assert training_digest(plain) != training_digest(replaying)
    assert "routing_replay" not in decisive(plain)["learner"]
    assert decisive(replaying)["learner"]["routing_replay"] is True

"""Experts that were recorded, in verl 0.9.1's own Megatron engine and Megatron-Core's own routers, on a CPU.

What needs a GPU is put in its place: the model is built here instead of by Megatron-Bridge, its attention is torch's,
and micro-batches run one after the other instead of in Megatron's schedule. What lays, masks and replays is verl's.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from learner_world import run_config, tiny_model
from torch import Tensor

from openforge.learner.backends.contract import BackendRefused
from openforge.learner.backends.verl_platform import use_cpu
from openforge.learner.packing import TrainSequence
from openforge.learner.routing import Mixture, Routing
from openforge.runs import RunConfig

LAYERS, EXPERTS, PER_TOKEN = 3, 8, 2
SPARSE = (1, 2)
"""The first layer is dense, as in DeepSeek's mixtures: its rows hold zeros."""

Choice = dict[tuple[int, int], list[tuple[int, ...]]]
"""By layer and token id the experts of each time that the token passed."""


@pytest.fixture(scope="module", autouse=True)
def _alone() -> Iterator[None]:
    """A process group of one, before verl's engines are imported."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    use_cpu()
    _register()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.cuda, "current_device", lambda: "cpu")  # where Megatron-Core puts what it computes with
        patched.setattr("megatron.core.transformer.moe.moe_utils.te_general_gemm", None, raising=False)  # not here
        for name, told in (("_get_all_rng_states", (None, None, None)), ("_set_all_rng_states", None)):
            patched.setattr(f"megatron.core.tensor_parallel.random.{name}", lambda *_, told=told: told)  # no dropout
        yield
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


CHOSEN: Choice = {}


def _register() -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.transformer_config import TransformerConfig
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.megatron import transformer_impl

    class OnCpu(transformer_impl.MegatronEngineWithLMHead):  # type: ignore[misc]
        def initialize(self) -> None:
            replays = {"moe_enable_routing_replay": True} if self.enable_routing_replay else {}
            self.tf_config = TransformerConfig(
                num_layers=LAYERS,
                hidden_size=32,
                num_attention_heads=2,
                ffn_hidden_size=32,
                num_moe_experts=EXPERTS,
                moe_router_topk=PER_TOKEN,
                moe_layer_freq=[int(layer in SPARSE) for layer in range(LAYERS)],
                moe_router_load_balancing_type="none",
                moe_token_dispatcher_type="allgather",
                use_cpu_initialization=True,
                attention_dropout=0.0,
                hidden_dropout=0.0,
                add_bias_linear=False,
                **replays,
                **self.engine_config.override_transformer_config,
            )
            spec = get_gpt_decoder_block_spec(self.tf_config, use_transformer_engine=False)
            for layer in spec.layer_specs:
                layer.submodules.self_attention.submodules.core_attention = PackedAttention
            torch.manual_seed(7)
            model = GPTModel(
                self.tf_config, spec, vocab_size=512, max_sequence_length=64, position_embedding_type="rope"
            )
            self.module = [model]
            self.optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            model.register_forward_pre_hook(self._note_ids, with_kwargs=True)
            for module in model.modules():
                if isinstance(module, TopKRouter):
                    module.register_forward_hook(self._note_choice)

        def _note_ids(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
            self.ids_T = kwargs["input_ids"][0].tolist()

        def _note_choice(self, router: Any, args: Any, said: tuple[Tensor, Tensor]) -> None:
            for token, chosen_E in zip(self.ids_T, said[1], strict=True):
                experts = tuple(chosen_E.nonzero()[:, 0].tolist())
                CHOSEN.setdefault((router.layer_number - 1, token), []).append(experts)

        def optimizer_zero_grad(self) -> None:
            self.optimizer.zero_grad()

        def optimizer_step(self) -> float:
            return float(
                torch.nn.utils.get_total_norm(p.grad for p in self.module[0].parameters() if p.grad is not None)
            )

    transformer_impl.get_forward_backward_func = lambda: _one_after_the_other
    EngineRegistry.register(model_type="language_model", backend="megatron", device="cpu")(OnCpu)


class PackedAttention(torch.nn.Module):
    """Causal, each sequence by itself: what Transformer Engine has for packed sequences."""

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: Any, **__: Any) -> Tensor:
        ends = packed_seq_params.cu_seqlens_q.tolist()
        told = [
            torch.nn.functional.scaled_dot_product_attention(
                *(part[start:end].transpose(0, 1) for part in (query, key, value)), is_causal=True
            ).transpose(0, 1)
            for start, end in pairwise(ends)
        ]
        return torch.cat(told).flatten(1)


def _one_after_the_other(
    *, forward_step_func: Callable[..., Any], data_iterator: Any, model: Any, num_microbatches: int, **more: Any
) -> list[Any]:
    assert num_microbatches > 1, "what is laid in one micro-batch is not laid in another"
    told = []
    for _ in range(num_microbatches):
        output, loss_of = forward_step_func(data_iterator, model[0])
        loss, said = loss_of(output)
        if not more["forward_only"]:
            (loss / num_microbatches).backward()
        told.append(said)
    return told


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_model(tmp_path)


def asked(model: Path, replays: bool = True, recompute: bool = False, **algorithm: object) -> RunConfig:
    learner = {
        "backend": "verl",
        "autocast": "bfloat16",
        "backend_options": {"engine": "megatron", "recompute": recompute},
        "row_tokens": 32,
        "routing_replay": replays,
    }
    return run_config(model, learner=learner, algorithm=algorithm)


def sequence(first_id: int, length: int) -> TrainSequence:
    """Of tokens that no other sequence has; nothing is recorded of it."""
    at_K = range(length // 2, length)
    return TrainSequence(
        ids_T=list(range(first_id, first_id + length)),
        at_K=list(at_K),
        mu_logprobs_K=[-1.0] * len(at_K),
        advantage=1.0,
        weight=0.01,
        temperature=1.0,
    )


def through(one: TrainSequence, rows: np.ndarray) -> TrainSequence:
    return msgspec.structs.replace(one, routing=Routing(rows.astype(np.int16).tobytes(), LAYERS, PER_TOKEN))


def drawn(one: TrainSequence) -> TrainSequence:
    """Through experts that chance chose, as different in each layer as for each token."""
    chance = np.random.default_rng(one.ids_T[0])
    rows = np.zeros((len(one.ids_T) - 1, LAYERS, PER_TOKEN))
    for layer in SPARSE:
        rows[:, layer] = [chance.permutation(EXPERTS)[:PER_TOKEN] for _ in rows]
    return through(one, rows)


def chosen(one: TrainSequence) -> np.ndarray:
    """What its tokens but the last went through, each time they passed the same."""
    rows = np.zeros((len(one.ids_T) - 1, LAYERS, PER_TOKEN))
    for layer in SPARSE:
        for place, token in enumerate(one.ids_T[:-1]):
            (rows[place, layer],) = set(CHOSEN[layer, token])
    return rows


def recorded(one: TrainSequence) -> np.ndarray:
    assert one.routing is not None
    return np.sort(one.routing.rows(), -1)


FIRST, SECOND, THIRD, FOURTH = sequence(10, 13), sequence(40, 20), sequence(80, 11), sequence(110, 15)


def backend(config: RunConfig) -> Any:
    from openforge.learner.backends.verl import VerlBackend

    CHOSEN.clear()
    return VerlBackend(config)


def test_each_layer_sends_each_token_through_its_recorded_experts_and_those_of_other_sequences_where_it_likes(
    model: Path,
) -> None:
    backend(asked(model, replays=False)).train([FIRST, SECOND, THIRD, FOURTH], 0)
    own = [chosen(one) for one in (FIRST, SECOND, THIRD, FOURTH)]
    replaying = backend(asked(model))
    assert replaying.mixture == Mixture(LAYERS, EXPERTS, PER_TOKEN, whole=True)
    first, third = drawn(FIRST), drawn(THIRD)
    replaying.train([first, SECOND, third, FOURTH], 0)
    for one, native in ((first, own[0]), (third, own[2])):
        assert (chosen(one) == recorded(one)).all()
        assert (chosen(one) != native).any(-1)[:, SPARSE].mean() > 0.5, "left alone, most go elsewhere"
    for one, native in ((SECOND, own[1]), (FOURTH, own[3])):
        assert (chosen(one) == native).all()
    for one in (first, third):
        for layer in SPARSE:
            (of_last,) = CHOSEN[layer, one.ids_T[-1]]
            assert len(of_last) == PER_TOKEN, "the router chose, no filler"


def test_a_model_that_is_told_its_own_choice_says_the_same_and_of_another_layer_or_token_something_else(
    model: Path,
) -> None:
    alone = backend(asked(model, replays=False))
    expected = alone.logprobs([FIRST, SECOND])
    own = [through(one, chosen(one)) for one in (FIRST, SECOND)]
    replaying = backend(asked(model))
    assert furthest(replaying.logprobs(own), expected) < 1e-6
    for turned in (
        lambda rows: rows[:, [0, *reversed(SPARSE)]],
        lambda rows: np.roll(rows, 1, 0),
        lambda rows: np.roll(rows, -1, 0),
    ):
        others = [through(one, turned(recorded(one))) for one in own]
        assert furthest(replaying.logprobs(others), expected) > 1e-4


def furthest(left: list[list[float]], right: list[list[float]]) -> float:
    return max(abs(a - b) for one, other in zip(left, right, strict=True) for a, b in zip(one, other, strict=True))


def test_activations_that_are_computed_again_go_through_the_same_experts(model: Path) -> None:
    sequences = [drawn(FIRST), SECOND, drawn(THIRD)]
    once = backend(asked(model)).train(sequences, 0)
    again = backend(asked(model, recompute=True)).train(sequences, 0)
    assert {len(times) for times in CHOSEN.values()} == {2}, "once forward, once more in the backward pass"
    assert (chosen(sequences[0]) == recorded(sequences[0])).all()
    assert (chosen(sequences[2]) == recorded(sequences[2])).all()
    assert again.grad_norm == pytest.approx(once.grad_norm, rel=1e-5)


def test_the_centre_is_computed_through_the_same_experts_and_the_reference_chooses_for_itself(model: Path) -> None:
    backend(asked(model, replays=False)).logprobs([FIRST, SECOND])
    native = chosen(FIRST)
    first = drawn(FIRST)
    backend(asked(model, objective="decoupled", kl_coefficient=0.1)).train([first, SECOND], 0)
    for layer in SPARSE:
        for place, token in enumerate(first.ids_T[:-1]):
            told, own = (tuple(rows[place, layer].tolist()) for rows in (recorded(first), native))
            assert sorted(CHOSEN[layer, token]) == sorted([told, told, own])


def test_a_model_without_experts_is_refused() -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from openforge.learner.backends.verl_engine import _mixture

    with pytest.raises(BackendRefused, match=r"learner.routing_replay = true: the model has no router"):
        _mixture(TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=2))

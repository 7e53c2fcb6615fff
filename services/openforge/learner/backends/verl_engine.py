"""verl 0.9.1's training engines, as far as the learner asks them. Beside `verl_platform` no other module knows verl.

Promises: only what an engine tells everyone is called (`BaseEngine`, configs, `EngineRegistry`), and a contract test
holds these calls against the pinned package; samples are one sequence each, so that no engine lets one see another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openforge.learner.backends import ranks
from openforge.learner.backends.contract import BackendRefused
from openforge.learner.backends.options import VerlOptions
from openforge.learner.routing import Mixture, Routing
from openforge.runs.config import LearnerSection

VERSION = "0.9.1"

Loss = Callable[[Mapping[str, Tensor], Mapping[str, Any], Any], tuple[Tensor, dict[str, Any]]]


class Sample(NamedTuple):
    """T ids; `columns` are values of as many places, place t for what is predicted there, which is id t+1.

    `routing` has a row for each id but the last, from which nothing is predicted.
    """

    ids_T: list[int]
    trained_T: list[bool]
    temperature: float
    columns: dict[str, list[float]]
    routing: Routing | None = None


class Sharded(NamedTuple):
    """The model within a network, named as the torch backend names it, and its optimizer."""

    network: Any
    optimizer: Any


class _Network(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model


def require_verl() -> None:
    """Raises `BackendRefused`."""
    try:
        found = version("verl")
    except PackageNotFoundError:
        found = "none"
    if found != VERSION:
        raise BackendRefused(
            f"learner.backend = 'verl' needs verl {VERSION}, and this interpreter has {found}: `make verl` makes a "
            ".venv-verl that has it, or set OPENFORGE_VERL_PYTHON to an interpreter that has it."
        )


class Engine:
    """One rank's share of a model and its optimizer. Every method is a collective.

    Where it `replays`, samples go through the experts of their `routing`, and those without go where the routers send
    them now.
    """

    def __init__(
        self, path: str, settings: LearnerSection, options: VerlOptions, on_cpu: bool, seed: int, replays: bool = False
    ) -> None:
        if on_cpu:
            from openforge.learner.backends.verl_platform import use_cpu

            use_cpu()
        from verl.trainer.config import CheckpointConfig
        from verl.workers.engine import EngineRegistry

        name, engine_config, optimizer_config = _configs(settings, options, seed, replays)
        self.model_config = _model_config(path, options)
        self.row_tokens = settings.row_tokens
        self._is_fsdp = options.engine == "fsdp"
        self.engine = EngineRegistry.new(
            model_type="language_model",
            backend=name,
            model_config=self.model_config,
            engine_config=engine_config,
            optimizer_config=optimizer_config,
            checkpoint_config=CheckpointConfig(),
        )
        self.engine.initialize()
        self.mixture = _mixture(self.engine.tf_config) if replays else None

    @property
    def copies(self) -> int:
        """How many ranks, or sets of ranks, compute samples of their own."""
        return int(self.engine.get_data_parallel_size())

    @property
    def copy(self) -> int:
        return int(self.engine.get_data_parallel_rank())

    @property
    def tells(self) -> bool:
        """Whether what this rank's samples say is known here, and on no other rank of its set."""
        return bool(self.engine.is_mp_src_rank_with_outputs())

    def step(self, samples: Sequence[Sample], loss: Loss, learning_rate: float) -> float:
        """One optimizer step; the norm of the gradient before clipping. Gradients are averaged over the copies."""
        with self.engine.train_mode():
            self.engine.optimizer_zero_grad()
            self.engine.forward_backward_batch(self._batch(samples), loss_function=loss, forward_only=False)
            for group in self.engine.optimizer.param_groups:
                group["lr"] = learning_rate
            return float(self.engine.optimizer_step())

    def logprobs(self, samples: Sequence[Sample]) -> list[list[float]]:
        """Of the trained places of each sample; empty where nothing is told."""
        with self.engine.eval_mode():
            found = self.engine.infer_batch(self._batch(samples), loss_function=None)
        if not self.tells:
            return []
        return [
            logprobs_T[torch.tensor(sample.trained_T, device=logprobs_T.device)].tolist()
            for logprobs_T, sample in zip(found["model_output"]["log_probs"].unbind(), samples, strict=True)
        ]

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Whole: FSDP's under the model's own names, Megatron's under those of the model's checkpoint. Exhaust it on
        every rank."""
        if not self._is_fsdp:
            yield from self.engine.get_per_tensor_param()[0]
            return
        for name, tensor in self.engine.module.state_dict().items():  # verl's export cuts experts apart, as Qwen's are
            yield name, ranks.whole(tensor)

    def sharded(self) -> Sharded | None:
        """What torch itself can store, of the engine that is plain FSDP2; None of another."""
        return Sharded(_Network(self.engine.module), self.engine.optimizer) if self._is_fsdp else None

    def save(self, folder: Path) -> None:
        """In verl's own files."""
        self.engine.save_checkpoint(local_path=str(folder))

    def load(self, folder: Path) -> None:
        self.engine.load_checkpoint(local_path=str(folder), del_local_after_load=False)

    def _batch(self, samples: Sequence[Sample]) -> Any:
        from verl.utils import tensordict_utils

        def jagged(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
            return torch.nested.as_nested_tensor([torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged)

        tensors = {
            "input_ids": jagged([one.ids_T for one in samples], torch.long),
            "position_ids": jagged([range(len(one.ids_T)) for one in samples], torch.long),
            "loss_mask": jagged([one.trained_T for one in samples], torch.float32),
            "temperature": torch.tensor([one.temperature for one in samples], dtype=torch.float32),
        }
        for name in samples[0].columns:
            tensors[name] = jagged([one.columns[name] for one in samples], torch.float32)
        if self.mixture is not None:
            tensors |= _replayed(samples, self.mixture)
        return tensordict_utils.get_tensordict(
            tensors,
            non_tensor_dict={
                "enable_routing_replay": self.mixture is not None,
                "use_remove_padding": True,
                "use_dynamic_bsz": True,
                "max_token_len_per_gpu": self.row_tokens,
                "use_fused_kernels": False,
            },
        )


def _mixture(transformer: Any) -> Mixture:
    """Of what verl's Megatron engine makes of the model: its routers take rows of so many layers and experts."""
    if not transformer.num_moe_experts:
        raise BackendRefused(
            "learner.routing_replay = true: the model has no router whose choice could be replayed; write false, or "
            "train a mixture of experts."
        )
    return Mixture(transformer.num_layers, transformer.num_moe_experts, transformer.moe_router_topk, whole=True)


def _replayed(samples: Sequence[Sample], mixture: Mixture) -> dict[str, Tensor]:
    """What verl asks for: experts of all layers in their order for each id but the last, and which samples have any.

    It replays all places of a sample but the last if something is set in the sample's `response_mask`, and none
    otherwise (`build_r3_replay_mask`); what stands in `routed_experts` there is not looked at.
    """

    def experts(one: Sample) -> Tensor:
        if one.routing is not None:
            return torch.tensor(one.routing.rows())
        return torch.zeros(len(one.ids_T) - 1, mixture.layers, mixture.per_token, dtype=torch.int16)

    return {
        "routed_experts": torch.nested.as_nested_tensor([experts(one) for one in samples], layout=torch.jagged),
        "response_mask": torch.tensor([[one.routing is not None] for one in samples]),
    }


def told_tokens(
    model_output: Mapping[str, Tensor], data: Mapping[str, Any]
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Of a micro-batch's N trained tokens: the log-probs, the sample that each is of, and the columns."""
    trained_T = data["loss_mask"].values().bool()
    lengths_S = data["input_ids"].offsets().diff()
    sample_T = torch.arange(len(lengths_S), device=trained_T.device).repeat_interleave(lengths_S)
    columns = {name: data[name].values()[trained_T] for name in COLUMNS.intersection(data.keys())}
    return model_output["log_probs"].values()[trained_T], sample_T[trained_T], columns


COLUMNS = frozenset({"mu", "advantage", "weight", "proximal", "reference"})


def _model_config(path: str, options: VerlOptions) -> Any:
    from verl.workers.config import HFModelConfig

    return HFModelConfig(
        path=path,
        load_tokenizer=options.engine == "megatron",  # which asks it for the padding id
        override_config={"attn_implementation": options.attention} if options.engine == "fsdp" else {},
        enable_gradient_checkpointing=options.recompute,
        use_remove_padding=True,
    )


def _configs(settings: LearnerSection, options: VerlOptions, seed: int, replays: bool = False) -> tuple[str, Any, Any]:
    """The engine's name in verl's registry, its config and its optimizer's."""
    from verl.workers.config import (
        EngineRouterReplayConfig,
        FSDPEngineConfig,
        FSDPOptimizerConfig,
        McoreEngineConfig,
        McoreOptimizerConfig,
    )

    optimizer = {
        "lr": settings.learning_rate,
        "betas": settings.betas,
        "weight_decay": settings.weight_decay,
        "clip_grad": settings.gradient_clip or float("inf"),
    }
    if options.engine == "megatron":
        return (
            "megatron",
            McoreEngineConfig(
                tensor_model_parallel_size=options.tensor_parallel,
                pipeline_model_parallel_size=options.pipeline_parallel,
                context_parallel_size=options.context_parallel,
                expert_model_parallel_size=options.expert_parallel,
                override_transformer_config=_recomputed(options),
                router_replay=EngineRouterReplayConfig(mode="R3" if replays else "disabled"),
                seed=seed,
            ),
            McoreOptimizerConfig(lr_decay_style="constant", total_training_steps=1, **optimizer),
        )
    dtype = "fp32" if settings.autocast == "none" else "bf16"
    return (
        "fsdp2",
        FSDPEngineConfig(
            strategy="fsdp2",
            mixed_precision={"param_dtype": dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
            ulysses_sequence_parallel_size=options.context_parallel,
            use_torch_compile=False,
            seed=seed,
        ),
        FSDPOptimizerConfig(total_training_steps=1, override_optimizer_config={"fused": True}, **optimizer),
    )


def _recomputed(options: VerlOptions) -> dict[str, Any]:
    if not options.recompute:
        return {}
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}

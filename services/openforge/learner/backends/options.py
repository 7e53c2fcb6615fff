"""`learner.backend_options`, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeVar

import msgspec

from openforge.learner.backends.contract import BackendRefused

Options = TypeVar("Options", bound=msgspec.Struct)


class TorchOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`device` `auto` is CUDA where there is one. `fill_tokens` is how far short rows are filled up: 0 is 512 on
    a CPU and `row_tokens` elsewhere. `recompute` trades a second forward pass for the memory of activations.
    `liger` uses the fused kernels of the package liger-kernel, on CUDA alone."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    fill_tokens: int = 0
    recompute: bool = False
    liger: bool = False


class VerlOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`engine` is verl's. `context_parallel` splits long sequences (Ulysses under `fsdp`); the other three are
    Megatron's alone. `attention` is what transformers calls it, for `fsdp`; `flash_attention_2` wants that package."""

    engine: Literal["fsdp", "megatron"] = "fsdp"
    attention: str = "sdpa"
    recompute: bool = False
    context_parallel: int = 1
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1


def torch_options(options: Mapping[str, object]) -> TorchOptions:
    return _options(options, TorchOptions)


def verl_options(options: Mapping[str, object]) -> VerlOptions:
    found = _options(options, VerlOptions)
    if found.engine == "fsdp" and (found.tensor_parallel, found.pipeline_parallel, found.expert_parallel) != (1, 1, 1):
        raise BackendRefused(
            f"learner.backend_options = {dict(options)}: verl's FSDP engine has no tensor, pipeline or expert "
            "parallelism; leave them out, or write engine = 'megatron'."
        )
    return found


def _options(options: Mapping[str, object], kind: type[Options]) -> Options:
    try:
        return msgspec.convert(dict(options), kind)
    except msgspec.ValidationError as error:
        names = ", ".join(kind.__struct_fields__)
        raise BackendRefused(f"learner.backend_options = {dict(options)}: {error}; there are {names}.") from None

"""`learner.backend_options` of the torch backend, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from openforge.learner.backends.contract import BackendRefused


class TorchOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`device` `auto` is CUDA where there is one. `fill_tokens` is how far short rows are filled up: 0 is 128 on
    a CPU and `row_tokens` elsewhere. `recompute` trades a second forward pass for the memory of activations.
    `liger` uses the fused kernels of the package liger-kernel, on CUDA alone."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    fill_tokens: int = 0
    recompute: bool = False
    liger: bool = False


def torch_options(options: Mapping[str, object]) -> TorchOptions:
    try:
        return msgspec.convert(dict(options), TorchOptions)
    except msgspec.ValidationError as error:
        names = ", ".join(TorchOptions.__struct_fields__)
        raise BackendRefused(f"learner.backend_options = {dict(options)}: {error}; there are {names}.") from None

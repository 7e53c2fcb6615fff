"""Fused kernels of the package liger-kernel, on CUDA, where `learner.backend_options.liger` asks for them.

Promises: what it replaces (rotary embedding, norm, gated activation) computes the same up to rounding; the head and
the loss are ours and stay; where it cannot work, the run is refused instead of being slow.
"""

from __future__ import annotations

from typing import Any

import torch

from openforge.learner.backends.contract import BackendRefused

ASKED = "learner.backend_options.liger = true"


def equip(model: Any, device: torch.device) -> None:
    """Raises `BackendRefused`."""
    if device.type != "cuda":
        raise BackendRefused(f"{ASKED}: these kernels need a CUDA device, and this is {device.type}; leave it out.")
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
    except ImportError:
        raise BackendRefused(f"{ASKED}: install liger-kernel beside openforge, or leave it out.") from None
    _apply_liger_kernel_to_instance(
        model=model, rope=True, rms_norm=True, swiglu=True, cross_entropy=False, fused_linear_cross_entropy=False
    )

"""Adapters on a CPU in a server that has one, as ours do: two products for all tokens of a step.

vLLM copies the adapter once for each token there and multiplies token by token, and it adapts tokens that asked for
no adapter too (0.32: `bgmv_shrink` of `lora.ops.torch_ops`, whose index -1 means the last adapter).
"""

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU


def multiply_at_once() -> None:
    """From now on, in this process. The server's `--max-loras` has to be 1."""
    PunicaWrapperCPU.add_lora_linear = _add_lora_linear


def _add_lora_linear(
    self: Any,
    y: torch.Tensor,
    x: torch.Tensor,
    lora_a_stacked: tuple[torch.Tensor, ...],
    lora_b_stacked: tuple[torch.Tensor, ...],
    scale: float,
    output_slices: tuple[int, ...],
    **_: Any,
) -> None:
    """Adds scale * x A^T B^T to each slice of y: x (tokens, in), A (1, 1, rank, in), B (1, 1, slice, rank)."""
    y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1]).float()
    adapted = scale * (self.token_lora_indices >= 0).float().unsqueeze(1)
    for part, down, up in zip(y.split(output_slices, dim=1), lora_a_stacked, lora_b_stacked, strict=True):
        low = x @ down[0, 0].float().T * adapted
        part += low.to(y.dtype) @ up[0, 0].to(y.dtype).T

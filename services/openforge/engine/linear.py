"""Matrix products with fixed weights, in the layout that the CPU's library likes best.

Promises: the same numbers as `torch.nn.functional.linear` up to rounding; bfloat16 products only where the
processor has them, for elsewhere they are several times slower than float32.
"""

import torch

_ROWS_HINT = 32  # a layout packed for about 32 rows was as good as any for 1 to 128 rows


def compute_dtype(weights: torch.dtype) -> torch.dtype:
    """What to compute in: bfloat16 weights are widened on processors without bfloat16 products."""
    return weights if weights is torch.float32 or _bfloat16_is_native() else torch.float32


def _bfloat16_is_native() -> bool:
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return bool(supported and supported())


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype is torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class Linear:
    """`x @ weight.T + bias`; the weight is packed once, if the library can."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._bias = bias
        self._packed = _can_pack(weight.dtype)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT) if self._packed else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed:
            result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return result
        return torch.nn.functional.linear(x, self._weight, self._bias)

    def plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """`self(x) + other`."""
        if self._packed:
            result: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, self._weight, self._bias, "add")
            return result
        return self(x) + other

"""Matrix products with fixed weights, in the layout that the CPU's library likes best.

Promises: the same numbers as `torch.nn.functional.linear` up to rounding; bfloat16 products only where the
processor has them, for elsewhere they are several times slower than float32; with `block`, the same bits for a row
whatever rows are beside it.
"""

from functools import lru_cache

import torch

_ROWS_HINT = 32  # a layout packed for about 32 rows was as good as any for 1 to 128 rows


def compute_dtype(weights: torch.dtype) -> torch.dtype:
    """What to compute in: bfloat16 weights are widened on processors without bfloat16 products."""
    return weights if weights is torch.float32 or _bfloat16_is_native() else torch.float32


def _bfloat16_is_native() -> bool:
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return bool(supported and supported())


@lru_cache
def _can_pack(dtype: torch.dtype) -> bool:
    """Whether packed products work here and are right: they are no public interface, so they are tried once."""
    x, weight = torch.randn(3, 64).to(dtype), torch.randn(32, 64).to(dtype)
    expected = torch.nn.functional.linear(x, weight)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
        plain = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
        added = torch.ops.mkldnn._linear_pointwise.binary(x, expected, packed, None, "add")
    except (RuntimeError, AttributeError, TypeError):
        return False
    return bool(
        torch.allclose(plain, expected, rtol=0.02, atol=0.1)
        and torch.allclose(added, 2 * expected, rtol=0.02, atol=0.2)
    )


class Linear:
    """`x @ weight.T + bias`; the weight is packed once, if the library can.

    Libraries choose the order of their sums by the number of rows. With `block` every product has so many, the last
    one filled up with zeros.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, block: int = 0) -> None:
        self._bias = bias
        self._block = block
        self._packed = _can_pack(weight.dtype)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT) if self._packed else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self._block:
            return self._product(x)
        full = torch.nn.functional.pad(x, (0, 0, 0, -len(x) % self._block))
        return torch.cat([self._product(rows) for rows in full.split(self._block)])[: len(x)]

    def plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """`self(x) + other`."""
        if self._packed and not self._block:
            result: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, self._weight, self._bias, "add")
            return result
        return self(x) + other

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed:
            result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return result
        return torch.nn.functional.linear(x, self._weight, self._bias)

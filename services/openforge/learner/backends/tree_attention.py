"""Attention over a row's forest, without computing what the mask would throw away.

A row is cut into runs of consecutive tokens, at the branches of its trees. In depth-first order such a run needs few
keys: its tokens' common trunk, their own branches, and nothing of the other branches. For a batch of groups with a long
prompt in common that is a quarter of the pairs that a masked square has.

The kernel is the one behind torch's `scaled_dot_product_attention` on CPUs. It is called by its own name, forward and
backward, since through autograd each run would give a gradient as long as the row, zeros included. The query heads
that share a key head are laid one after another as queries of that one head, so that keys are not repeated.

Promises: the same numbers as masked attention over the whole row, up to rounding. Without a plan it is
causal attention, so that the model works as ever.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

NAME = "openforge_tree"
RUN_TOKENS = 128
SHORTEST_RUN = 32
"""Branches shorter than this are computed with their neighbours, since each call of the kernel has a price."""

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Run(NamedTuple):
    """Tokens start..stop, Q of them, attend to the K tokens of the ranges `keys`, where `bias_QK` is 0 or -inf."""

    start: int
    stop: int
    keys: tuple[slice, ...]
    bias_QK: Tensor


def plan_of(ends_T: Tensor) -> tuple[Run, ...]:
    """How to compute attention where token i sees token j for j <= i < ends[j], run by run."""
    index_T = torch.arange(len(ends_T))
    return tuple(_run(ends_T, index_T, start, stop) for start, stop in _runs(ends_T, index_T))


def _runs(ends_T: Tensor, index_T: Tensor) -> list[tuple[int, int]]:
    """A token without descendants is followed by another branch, or another tree."""
    branches = (index_T[1:][ends_T[:-1] <= index_T[1:]]).tolist()
    found, start = list[tuple[int, int]](), 0
    for stop in [*branches, len(ends_T)]:
        if stop - start < SHORTEST_RUN and stop < len(ends_T):
            continue
        pieces = -(-(stop - start) // RUN_TOKENS)
        cuts = [start + (stop - start) * piece // pieces for piece in range(pieces + 1)]
        found += itertools.pairwise(cuts)
        start = stop
    return found


def _run(ends_T: Tensor, index_T: Tensor, start: int, stop: int) -> Run:
    keys_K = (ends_T[:stop] > start).nonzero()[:, 0]
    queries_Q1 = index_T[start:stop, None]
    seen_QK = (keys_K <= queries_Q1) & (queries_Q1 < ends_T[keys_K])
    bias_QK = torch.zeros(seen_QK.shape).masked_fill_(~seen_QK, float("-inf"))
    gaps = (keys_K.diff() > 1).nonzero()[:, 0] + 1
    ranges = tuple(slice(int(part[0]), int(part[-1]) + 1) for part in keys_K.tensor_split(gaps))
    return Run(start, stop, ranges, bias_QK)


def equip(model: Any) -> bool:
    """Let the model attend by plan; False where it does not attend to all that comes before, and is left as it is."""
    from transformers import AttentionInterface

    kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or getattr(model.config, "sliding_window", None):
        return False
    AttentionInterface.register(NAME, attend)
    model.set_attn_implementation(NAME)
    return True


def attend(
    module: Any,
    query_BHTD: Tensor,
    key_BhTD: Tensor,
    value_BhTD: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    tree_plan: tuple[Run, ...] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention interface; `tree_plan` comes from whoever calls the model, with a batch of one row."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if tree_plan is None:
        output: tuple[Tensor, None] = sdpa_attention_forward(
            module, query_BHTD, key_BhTD, value_BhTD, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query_BHTD.dtype
    query_HTD, key_hTD, value_hTD = (one[0].to(dtype) for one in (query_BHTD, key_BhTD, value_BhTD))
    scale = query_BHTD.shape[-1] ** -0.5 if scaling is None else scaling
    return _TreeAttention.apply(query_HTD, key_hTD, value_hTD, tree_plan, scale)[None], None


class _TreeAttention(torch.autograd.Function):  # type: ignore[misc]
    """(T, H, D), as the projection after it reads."""

    @staticmethod
    def forward(
        ctx: Any, query_HTD: Tensor, key_hTD: Tensor, value_hTD: Tensor, plan: tuple[Run, ...], scale: float
    ) -> Tensor:
        heads, tokens, width = query_HTD.shape
        key_heads = len(key_hTD)
        query_THD = query_HTD.transpose(0, 1)
        output_THD = query_HTD.new_empty(tokens, heads, width)
        sums = list[Tensor]()
        for run in plan:
            found, sum_of_exp = _forward(
                _folded(query_THD, run, key_heads),
                _at(key_hTD, run),
                _at(value_hTD, run),
                attn_mask=_bias(run, query_HTD, heads // key_heads),
                scale=scale,
            )
            _unfold(found, output_THD, run)
            sums.append(sum_of_exp)
        ctx.save_for_backward(query_HTD, key_hTD, value_hTD, output_THD, *sums)
        ctx.plan, ctx.scale = plan, scale
        return output_THD

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:
        query_HTD, key_hTD, value_hTD, output_THD, *sums = ctx.saved_tensors
        heads, key_heads = len(query_HTD), len(key_hTD)
        query_THD = query_HTD.transpose(0, 1)
        d_query_THD = torch.empty_like(output_THD)
        d_key_hTD, d_value_hTD = torch.zeros_like(key_hTD), torch.zeros_like(value_hTD)
        for run, sum_of_exp in zip(ctx.plan, sums, strict=True):
            d_query, d_key, d_value = _backward(
                _folded(grad_THD, run, key_heads),
                _folded(query_THD, run, key_heads),
                _at(key_hTD, run),
                _at(value_hTD, run),
                _folded(output_THD, run, key_heads),
                sum_of_exp,
                0.0,
                False,
                attn_mask=_bias(run, query_HTD, heads // key_heads),
                scale=ctx.scale,
            )
            _unfold(d_query, d_query_THD, run)
            _add_at(d_key_hTD, run, d_key)
            _add_at(d_value_hTD, run, d_value)
        return d_query_THD.transpose(0, 1), d_key_hTD, d_value_hTD, None, None


def _folded(whole_THD: Tensor, run: Run, key_heads: int) -> Tensor:
    """(1, h, Q * H / h, D): a run's queries, those of each key head one after another."""
    part_QHD = whole_THD[run.start : run.stop]
    queries, heads, width = part_QHD.shape
    parts_hgQD = part_QHD.view(queries, key_heads, heads // key_heads, width).permute(1, 2, 0, 3)
    return parts_hgQD.reshape(1, key_heads, -1, width)


def _unfold(folded: Tensor, whole_THD: Tensor, run: Run) -> None:
    part_QHD = whole_THD[run.start : run.stop]
    queries, heads, width = part_QHD.shape
    key_heads = folded.shape[1]
    parts_hgQD = folded.view(key_heads, heads // key_heads, queries, width)
    part_QHD.view(queries, key_heads, heads // key_heads, width).copy_(parts_hgQD.permute(2, 0, 1, 3))


def _at(whole_hTD: Tensor, run: Run) -> Tensor:
    """(1, h, K, D)"""
    parts = [whole_hTD[:, keys] for keys in run.keys]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1))[None]


def _add_at(whole_hTD: Tensor, run: Run, part_1hKD: Tensor) -> None:
    start = 0
    for keys in run.keys:
        stop = start + keys.stop - keys.start
        whole_hTD[:, keys] += part_1hKD[0, :, start:stop]
        start = stop


def _bias(run: Run, query_HTD: Tensor, heads_per_key: int) -> Tensor:
    """(1, 1, Q * H / h, K)"""
    return run.bias_QK.to(query_HTD.dtype).repeat(heads_per_key, 1)[None, None]

"""Attention over a row's forest, without computing what the mask would throw away.

A row is cut into runs of consecutive tokens. In depth-first order such a run needs few keys: its tokens' common
trunk, their own branches, and nothing of the other branches. For a batch of groups with a long prompt in
common that is a quarter of the pairs that a masked square has.

Promises: the same numbers as masked attention over the whole row, up to rounding. Without a plan it is
causal attention, so that the model works as ever.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

NAME = "openforge_tree"
RUN_TOKENS = 128


class Run(NamedTuple):
    """Tokens start..stop, Q of them, attend to the K tokens `keys_K`, where `bias_QK` is 0 or -inf."""

    start: int
    stop: int
    keys_K: Tensor
    bias_QK: Tensor


def plan_of(mask_TT: Tensor) -> tuple[Run, ...]:
    """How to compute attention under this mask, run by run."""
    return tuple(
        _run(mask_TT, start, min(start + RUN_TOKENS, len(mask_TT))) for start in range(0, len(mask_TT), RUN_TOKENS)
    )


def _run(mask_TT: Tensor, start: int, stop: int) -> Run:
    seen_QT = mask_TT[start:stop]
    keys_K = seen_QT.any(0).nonzero()[:, 0]
    bias_QK = torch.zeros(stop - start, len(keys_K), device=mask_TT.device)
    return Run(start, stop, keys_K, bias_QK.masked_fill_(~seen_QT[:, keys_K], float("-inf")))


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
    """Transformers' attention interface; `tree_plan` comes from whoever calls the model."""
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

    if tree_plan is None:
        output: tuple[Tensor, None] = sdpa_attention_forward(
            module, query_BHTD, key_BhTD, value_BhTD, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output
    heads_per_key = query_BHTD.shape[1] // key_BhTD.shape[1]
    parts = [
        scaled_dot_product_attention(
            query_BHTD[:, :, run.start : run.stop],
            repeat_kv(key_BhTD[:, :, run.keys_K], heads_per_key),
            repeat_kv(value_BhTD[:, :, run.keys_K], heads_per_key),
            attn_mask=run.bias_QK.to(query_BHTD.dtype),
            scale=scaling,
        )
        for run in tree_plan
    ]
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None

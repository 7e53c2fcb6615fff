"""A model of a checkpoint folder as transformers has it, in float32 on the CPU."""

from __future__ import annotations

from typing import Any

import torch


def load_plain(path: str, recompute: bool = False) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    model.config.use_cache = False
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def parameter_names(path: str) -> frozenset[str]:
    """Without those that are tied to others. No weights are read."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    return frozenset(name for name, _ in model.named_parameters())

"""A model of a checkpoint folder as transformers has it, in float32 on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from openforge.learner.backends.contract import BackendRefused


def load_plain(path: str, recompute: bool = False) -> Any:
    """Raises `BackendRefused` where its weights cannot be read."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    except SafetensorError as error:
        raise BackendRefused(f"model {path}: its weights cannot be read ({error}): get it anew") from None
    model.config.use_cache = False
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def parameter_names(path: str) -> frozenset[str]:
    """Without those that are tied to others. No weights are read."""
    return frozenset(name for name, _ in _described(path).named_parameters())


def as_stored(path: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A model's tensors as its checkpoint names and cuts them: transformers computes all experts of a layer as one."""
    from transformers.core_model_loading import revert_weight_conversion

    stored: dict[str, torch.Tensor] = revert_weight_conversion(_described(path), dict(tensors))
    return stored


def as_computed(path: str, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The other way round: tensors as the checkpoint names and cuts them, as the model's own parameters."""
    from transformers import AutoConfig

    model, said = type(_described(path)).from_pretrained(
        None,
        config=AutoConfig.from_pretrained(path),
        state_dict=dict(stored),
        dtype=next(iter(stored.values())).dtype,
        output_loading_info=True,
    )
    if missing := said["missing_keys"]:
        raise RuntimeError(f"nothing was told of {sorted(missing)[:3]} and {len(missing)} of the model's parameters")
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@lru_cache(maxsize=2)
def _described(path: str) -> Any:
    """The model without any numbers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))

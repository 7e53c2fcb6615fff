"""Low-rank adapters (LoRA, arXiv 2106.09685; `peft`) inside the policy.

Promises: the adapters start without effect; what is exported are the plain weights with the adapters merged in, under
the names of the model's own checkpoint, so that every engine can load it; or the adapters alone, as peft writes them;
without adapters the model is the one the run started from.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from openforge.learner.backends import ranks
from openforge.learner.backends.contract import BackendRefused
from openforge.runs.config import LoraSection
from openforge.weights import ADAPTERS, Dtype, save_tensors

ADAPTER = "default"
_BASE, _DOWN, _UP = ".base_layer", ".lora_A.", ".lora_B."
_PEFT = "base_model.model."


def equip(model: Any, lora: LoraSection) -> None:
    """Put adapters into the model's layers and freeze all else. Raises `BackendRefused`."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise BackendRefused(
            f"learner.lora.rank = {lora.rank} needs the package peft, which is not installed: "
            "pip install 'openforge[learner]', or write rank = 0"
        ) from None
    targets = "all-linear" if lora.targets == ("all-linear",) else list(lora.targets)
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets)
    try:
        with warnings.catch_warnings():  # of patterns for experts that peft adds by itself
            warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys", RuntimeWarning)
            inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    except ValueError as error:
        raise BackendRefused(
            f"learner.lora.targets = {list(lora.targets)} cannot be adapted in this model: {error}; "
            'write ["all-linear"], or names of its linear layers'
        ) from None
    if any(_DOWN in name and ".experts." in name for name, _ in model.named_parameters()):
        raise BackendRefused(
            f"learner.lora.targets = {list(lora.targets)} would adapt experts, which engines cannot put adapters on; "
            'write ["q_proj", "k_proj", "v_proj", "o_proj"], or rank = 0'
        )


def merged(parameters: Mapping[str, Tensor], lora: LoraSection) -> dict[str, Tensor]:
    """W + alpha / rank * B A for every adapted layer, whole, on the CPU: a collective."""
    scale = lora.alpha / lora.rank
    found = {}
    for name, parameter in parameters.items():
        if _DOWN in name or _UP in name:
            continue
        weight = ranks.whole(parameter.detach()).to("cpu")
        if name.endswith(f"{_BASE}.weight"):
            stem = name.removesuffix(f"{_BASE}.weight")
            down = ranks.whole(parameters[f"{stem}{_DOWN}{ADAPTER}.weight"].detach()).to("cpu")
            up = ranks.whole(parameters[f"{stem}{_UP}{ADAPTER}.weight"].detach()).to("cpu")
            weight = weight + scale * (up @ down)
        found[name.replace(_BASE, "")] = weight
    return found


def alone(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The adapters under the names that peft gives them in a file, whole, on the CPU: a collective."""
    return {
        f"{_PEFT}{name.replace(f'.{ADAPTER}.', '.')}": ranks.whole(parameter.detach()).to("cpu")
        for name, parameter in parameters.items()
        if _DOWN in name or _UP in name
    }


def write(folder: Path, adapters: Mapping[str, Tensor], lora: LoraSection, model_path: str, dtype: Dtype) -> None:
    """`adapters`, as `alone` names them, in the files that peft reads."""
    save_tensors(folder / ADAPTERS, adapters, dtype)
    peft_config(adapters, lora, model_path).save_pretrained(folder)


def peft_config(adapters: Mapping[str, Tensor], lora: LoraSection, model_path: str) -> Any:
    """What peft has to know of `adapters`, as `alone` names them, to put them on the model again."""
    from peft import LoraConfig

    layers = {name.split(_DOWN)[0].rsplit(".", 1)[-1] for name in adapters if _DOWN in name}
    targets = sorted(layers) if lora.targets == ("all-linear",) else list(lora.targets)
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=targets,
        base_model_name_or_path=model_path,
        task_type="CAUSAL_LM",
        inference_mode=True,
    )


@contextmanager
def without(model: Any) -> Iterator[None]:
    """The model as it was before it was trained."""
    layers = [layer for layer in model.modules() if hasattr(layer, "lora_A") and hasattr(layer, "set_scale")]
    for layer in layers:
        layer.set_scale(ADAPTER, 0.0)
    try:
        yield
    finally:
        for layer in layers:
            layer.set_scale(ADAPTER, 1.0)

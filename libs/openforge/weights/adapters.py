"""Low-rank adapters in a weights folder, and what they make of the weights that they were trained on.

Promises: every version is merged into the same pristine weights, in float32, so no error adds up over versions;
adapters that are more than a low-rank sum, or that belong to other weights, are refused by name.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from openforge.weights.check import check, manifest_of
from openforge.weights.manifest import ADAPTERS, BASE, WEIGHTS, BadWeights, Manifest, read_manifest
from openforge.weights.write import drafted, write_model

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "adapter_config.json"
PREFIX = "base_model.model."
"""How peft begins the name of every tensor in its file."""
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
_MORE_THAN_A_SUM = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save", "fan_in_fan_out")


class Adapters(msgspec.Struct, frozen=True):
    """`tensors` as peft names them; a layer's weight gets `scale` times up times down."""

    scale: float
    tensors: Mapping[str, Any]


def base_of(folder: Path, manifest: Manifest) -> Path:
    """The folder of the weights that the adapters in `folder` change; raises `BadWeights`.

    Its manifest is read each time, its files are hashed once in this process.
    """
    base = folder.parent / BASE
    manifest_of(base, manifest.base)
    _check_once(base, manifest.base)
    return base


@lru_cache
def _check_once(base: Path, digest: str) -> None:
    check(base, digest)


def rank_of(manifest: Manifest) -> int:
    """The highest rank among the adapters."""
    return max((entry.shape[0] for name, entry in manifest.tensors.items() if name.endswith(DOWN)), default=0)


def targets_of(manifest: Manifest) -> list[str]:
    """The names of the layers that are adapted, as they are in any block."""
    return sorted({name.removesuffix(DOWN).rpartition(".")[2] for name in manifest.tensors if name.endswith(DOWN)})


def read_adapters(folder: Path) -> Adapters:
    """Raises `BadWeights`."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        config: dict[str, Any] = json.loads(folder.joinpath(CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(folder / ADAPTERS)
        scale = float(config["lora_alpha"]) / float(config["r"])
    except (OSError, ValueError, KeyError, ZeroDivisionError, SafetensorError) as error:
        raise BadWeights(f"adapters {folder}: cannot be read ({error!r}).") from error
    if more := [name for name in _MORE_THAN_A_SUM if config.get(name)] or _bias(config):
        raise BadWeights(f"adapters {folder}: {', '.join(more)} in {CONFIG} is more than a low-rank sum.")
    return Adapters(scale, tensors)


def _bias(config: Mapping[str, Any]) -> list[str]:
    return ["bias"] if config.get("bias", "none") != "none" else []


def merged(base: Mapping[str, "Tensor"], adapters: Adapters) -> dict[str, "Tensor"]:
    """W + scale * B A in float32 where there are adapters, and W as it is elsewhere. Raises `BadWeights`."""
    found = dict(base)
    for name, down in adapters.tensors.items():
        if not name.endswith(DOWN):
            continue
        stem = name.removesuffix(DOWN)
        weight, up = found.get(f"{stem.removeprefix(PREFIX)}.weight"), adapters.tensors.get(f"{stem}{UP}")
        if weight is None or up is None or weight.shape != (up.shape[0], down.shape[1]):
            raise BadWeights(f"adapters of {stem.removeprefix(PREFIX)}: the weights have no layer that they would fit.")
        found[f"{stem.removeprefix(PREFIX)}.weight"] = weight.float() + adapters.scale * (up.float() @ down.float())
    return found


def whole_folder(folder: Path, root: Path) -> Path:
    """A published folder that transformers loads: `folder` itself, or one below `root` with its adapters merged in.

    Raises `BadWeights`.
    """
    manifest = read_manifest(folder)
    if not manifest.base:
        return folder
    out = root / folder.name
    if not out.exists():
        from safetensors.torch import load_file

        base = base_of(folder, manifest)
        tensors = merged(load_file(base / WEIGHTS), read_adapters(folder))
        with drafted(out) as draft:
            write_model(draft, tensors, config_dir=base, dtype=manifest.dtype)
    return out

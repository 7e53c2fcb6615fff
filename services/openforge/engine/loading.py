"""From a weights folder to a model that may serve.

Promises: what comes out is what the manifest says, byte for byte, and computes what its writer computed; nothing that
serves is touched before that is known.
"""

import hashlib
from pathlib import Path

import msgspec
import torch

from openforge.engine.backend import Laps
from openforge.engine.batching import score
from openforge.engine.checkpoint import LlamaShape, read_shape, read_tensors
from openforge.engine.llama import Llama
from openforge.engine.probe import coarser, judge_probe
from openforge.weights import MANIFEST, Manifest, check, read_manifest
from openforge.weights.adapters import base_of, merged, read_adapters

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """A model and what is known of it. A folder without manifest has version "" and digest "".

    `model_folder` has config and tokenizer: where `folder` has adapters alone, it is that of the weights below them.
    """

    model: Llama
    folder: Path
    model_folder: Path
    version: str = ""
    incarnation: int = 0
    digest: str = ""
    probe_error: float = 0.0
    load_s: float = 0.0
    check_s: float = 0.0
    probe_s: float = 0.0


def load(folder: Path, dtype: str, *, digest: str = "", batch_invariant: bool = False) -> Loaded:
    """`dtype` is what the engine serves in. `digest` is that of the fact, where there is one. Raises `BadWeights`."""
    clock = Laps()
    manifest = _checked_manifest(folder, digest)
    model_folder = base_of(folder, manifest) if manifest and manifest.base else folder
    check_s = clock.lap()
    with torch.inference_mode():
        shape = read_shape(model_folder)
        tensors = _tensors(folder, model_folder, shape)
        model = Llama(shape, tensors, DTYPES[dtype], batch_invariant=batch_invariant)
        clock.lap()
        error = _probe_error(model, manifest, folder, dtype) if manifest else 0.0
    return Loaded(
        model=model,
        folder=folder,
        model_folder=model_folder,
        version=str(manifest.version) if manifest else "",
        incarnation=manifest.incarnation if manifest else 0,
        digest=digest or (_digest(folder) if manifest else ""),
        probe_error=error,
        load_s=clock.total(),
        check_s=check_s,
        probe_s=clock.lap(),
    )


def _tensors(folder: Path, model_folder: Path, shape: LlamaShape) -> dict[str, torch.Tensor]:
    tensors = read_tensors(model_folder, shape)
    return tensors if model_folder == folder else merged(tensors, read_adapters(folder))


def _probe_error(model: Llama, manifest: Manifest, folder: Path, dtype: str) -> float:
    if (probe := manifest.probe) is None:
        return 0.0
    found = score(model, probe.prompt_ids, probe.token_ids)
    return judge_probe(found, probe, folder, coarser(dtype, manifest.dtype))


def _checked_manifest(folder: Path, digest: str) -> Manifest | None:
    if not digest and not folder.joinpath(MANIFEST).exists():
        return None
    check(folder, digest or _digest(folder))
    return read_manifest(folder)


def _digest(folder: Path) -> str:
    return hashlib.sha256(folder.joinpath(MANIFEST).read_bytes()).hexdigest()

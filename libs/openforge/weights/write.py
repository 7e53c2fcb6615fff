"""Writing a weights folder: under another name, synced, then renamed."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from openforge.weights.manifest import (
    MANIFEST,
    WEIGHTS,
    Dtype,
    FileEntry,
    Manifest,
    Probe,
    Written,
    digest_of,
    folder_name,
)
from openforge.weights.safetensors_header import tensors_of

if TYPE_CHECKING:
    import torch

_CONFIG = "config.json"
_NOT_COPIED = {".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack"}
_NOT_COPIED_NAMES = {MANIFEST, "openforge.json", "model.safetensors.index.json", "pytorch_model.bin.index.json"}


def write_weights(
    root: str | Path,
    tensors: Mapping[str, "torch.Tensor"],
    *,
    config_dir: str | Path,
    version: int,
    incarnation: int,
    probe: Probe | None,
    dtype: Dtype,
    parent: str = "",
) -> Written:
    """Write `tensors` (checkpoint names) as folder `v<version>-<incarnation>` of `root`.

    Config and tokenizer files come from `config_dir`. A folder of that name that was left by a crash
    before its fact was told is replaced.
    """
    stated = Manifest(
        version=version, incarnation=incarnation, parent=parent, dtype=dtype, files={}, tensors={}, probe=probe
    )
    fill = partial(write_model, tensors=tensors, config_dir=config_dir, dtype=dtype)
    return write_folder(Path(root) / folder_name(version, incarnation), stated, fill)


def write_folder(final: Path, stated: Manifest, fill: Callable[[Path], None]) -> Written:
    """What `fill` puts into the folder that it is given, with the manifest `stated` of its files and tensors."""
    with drafted(final) as draft:
        fill(draft)
        manifest = msgspec.structs.replace(
            stated,
            files={file.name: FileEntry.of(file) for file in sorted(draft.iterdir())},
            tensors=tensors_of(draft / stated.weights),
        )
        data = msgspec.json.encode(manifest)
        draft.joinpath(MANIFEST).write_bytes(data)
    size = len(data) + sum(entry.bytes for entry in manifest.files.values())
    return Written(path=final, digest=digest_of(data), bytes=size)


@contextmanager
def drafted(final: Path) -> Iterator[Path]:
    """An empty folder, to be filled, that is on disk and has the name `final` once the block ends well, and is gone
    otherwise."""
    final.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
    try:
        yield draft
        _publish(draft, final)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def write_model(folder: Path, tensors: Mapping[str, "torch.Tensor"], *, config_dir: str | Path, dtype: Dtype) -> None:
    """Fill `folder` with what transformers loads: `tensors`, and config and tokenizer files of `config_dir`."""
    config = _copy_config(Path(config_dir), folder, dtype)
    save_tensors(folder / WEIGHTS, tensors, dtype, tied=bool(config.get("tie_word_embeddings")))


def _copy_config(source: Path, draft: Path, dtype: Dtype) -> dict[str, Any]:
    for file in source.iterdir():
        if file.is_file() and file.suffix not in _NOT_COPIED and file.name not in _NOT_COPIED_NAMES:
            shutil.copyfile(file, draft / file.name)
    config: dict[str, Any] = json.loads(draft.joinpath(_CONFIG).read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = dtype
    draft.joinpath(_CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
    return config


def save_tensors(path: Path, tensors: Mapping[str, "torch.Tensor"], dtype: Dtype, *, tied: bool = False) -> None:
    """As safetensors; the output head of a `tied` model is left out."""
    import torch
    from safetensors.torch import save_file

    target = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
    kept = {name: tensor for name, tensor in tensors.items() if not (tied and name == "lm_head.weight")}
    save_file(
        {name: tensor.detach().to("cpu", target).contiguous() for name, tensor in kept.items()},
        path,
        metadata={"format": "pt"},
    )
    path.chmod(0o644)  # safetensors writes files that only their owner can read


def _publish(draft: Path, final: Path) -> None:
    for file in draft.iterdir():
        _sync(file)
    draft.chmod(0o755)
    _sync(draft)
    if final.exists():
        shutil.rmtree(final)
    os.replace(draft, final)
    _sync(final.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

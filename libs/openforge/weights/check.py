"""Is a weights folder what it claims to be?"""

from pathlib import Path

from openforge.weights.manifest import BadWeights, FileEntry, Manifest, decode_manifest, digest_of, manifest_bytes
from openforge.weights.safetensors_header import tensors_of


def check(path: str | Path, digest: str) -> None:
    """Raise `BadWeights`, saying what is wrong, unless the folder is exactly what `digest` stands for."""
    folder = Path(path)
    manifest = manifest_of(folder, digest)
    _check_tensors(folder, manifest)
    for name, entry in manifest.files.items():
        _check_file(folder / name, entry)


def manifest_of(path: str | Path, digest: str) -> Manifest:
    """The folder's manifest, which is what `digest` stands for; raises `BadWeights`. The files are not looked at."""
    folder = Path(path)
    data = manifest_bytes(folder)
    if digest_of(data) != digest:
        raise BadWeights(f"weights {folder}: the manifest has digest {digest_of(data)[:12]}, expected {digest[:12]}.")
    return decode_manifest(data, folder)


def _check_tensors(folder: Path, manifest: Manifest) -> None:
    found = tensors_of(folder / manifest.weights)
    if found == manifest.tensors:
        return
    missing = sorted(manifest.tensors.keys() - found.keys())
    extra = sorted(found.keys() - manifest.tensors.keys())
    other = sorted(name for name in found.keys() & manifest.tensors.keys() if found[name] != manifest.tensors[name])
    raise BadWeights(
        f"weights {folder}: tensors differ from the manifest: missing {missing[:3]}, "
        f"not stated {extra[:3]}, of other shape or dtype {other[:3]}."
    )


def _check_file(path: Path, entry: FileEntry) -> None:
    try:
        difference = entry.difference(path)
    except OSError as error:
        raise BadWeights(f"weights {path}: cannot be read ({error.strerror}).") from error
    if difference:
        raise BadWeights(f"weights {path}: {difference}.")

"""What a weights folder says of itself. Its sha256 is the folder's digest."""

import hashlib
from pathlib import Path
from typing import Literal, Self

import msgspec
from blake3 import blake3

MANIFEST = "manifest.json"
WEIGHTS = "model.safetensors"
ADAPTERS = "adapter_model.safetensors"
BASE = "base"
"""The folder of the weights that adapters belong to, beside theirs."""
SCHEMA = 1

Dtype = Literal["float32", "bfloat16"]


class BadWeights(Exception):
    """The folder is not what its manifest or the fact about it says."""


class FileEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Older folders have `sha256` in the place of `blake3`."""

    bytes: int
    blake3: str = ""
    sha256: str = ""

    @classmethod
    def of(cls, path: Path) -> Self:
        """Raises `OSError`."""
        return cls(bytes=path.stat().st_size, blake3=_blake3(path))

    def difference(self, path: Path) -> str:
        """In words what `path` has other than this says, or the empty string. Raises `OSError`."""
        if (size := path.stat().st_size) != self.bytes:
            return f"{size} bytes, the manifest says {self.bytes}"
        name, stated = ("blake3", self.blake3) if self.blake3 else ("sha256", self.sha256)
        found = _blake3(path) if self.blake3 else _sha256(path)
        return "" if found == stated else f"{name} {found[:12]}, the manifest says {stated[:12]}"


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True):
    """`dtype` as safetensors spells it, such as F32 or BF16."""

    shape: tuple[int, ...]
    dtype: str


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """What whoever wrote the weights computed with them: the log-probs of `token_ids` after
    `prompt_ids`, float32, temperature 1, nothing cut off. Whoever loads them computes them again."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """`parent` is the digest of the version that these weights were trained from, if any.

    Where `base` is not empty the weights are low-rank adapters in peft's files, and `base` is the digest of the folder
    of that name beside this one, which has the weights that they change.
    """

    schema: int = SCHEMA
    version: int
    incarnation: int
    parent: str = ""
    dtype: Dtype
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]
    probe: Probe | None = None
    base: str = ""

    @property
    def weights(self) -> str:
        """The file that has the tensors."""
        return ADAPTERS if self.base else WEIGHTS


_PIECE_BYTES = 8 << 20


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """A complete folder. `bytes` is the size of all its files."""

    path: Path
    digest: str
    bytes: int


def folder_name(version: int, incarnation: int) -> str:
    return f"v{version:06d}-{incarnation}"


def _blake3(path: Path) -> str:
    """Read, not mapped: of a mapped file an error of the disk would be the end of the process."""
    found = blake3(max_threads=blake3.AUTO)
    piece = memoryview(bytearray(_PIECE_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            found.update(piece[:count])
    return found.hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(manifest_bytes: bytes) -> str:
    return hashlib.sha256(manifest_bytes).hexdigest()


def read_manifest(path: str | Path) -> Manifest:
    """The manifest of the folder `path`; raises `BadWeights` if there is none that can be read."""
    return decode_manifest(manifest_bytes(path), Path(path))


def manifest_bytes(path: str | Path) -> bytes:
    try:
        return Path(path, MANIFEST).read_bytes()
    except OSError as error:
        raise BadWeights(f"weights {path}: no readable {MANIFEST} ({error.strerror}).") from error


def decode_manifest(data: bytes, path: Path) -> Manifest:
    try:
        return msgspec.json.decode(data, type=Manifest)
    except msgspec.DecodeError as error:
        raise BadWeights(f"weights {path}: {MANIFEST} cannot be decoded: {error}.") from error

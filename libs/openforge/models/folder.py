"""How a model folder comes to be: in one step, with a record of the sha256 of every file."""

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

import msgspec

RECORD = "openforge.json"
TEMPLATE = "chat_template.jinja"
_DRAFT_AGE_S = 3600.0


class ModelRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Where a model folder came from. `files` maps names to sha256 in hex."""

    name: str
    source: str
    license: str
    files: dict[str, str]


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def chat_template() -> str:
    """The tool-capable ChatML template that every model made here gets."""
    return files("openforge.models").joinpath("chatml_hermes.jinja").read_text(encoding="utf-8")


@contextmanager
def made_at_once(path: Path, *, name: str, source: str, license: str) -> Iterator[Path]:
    """A folder to fill; it gets its record and then the name `path`, or vanishes on an error.

    Whoever finished first wins: a folder that stands at `path` by then is kept. Drafts that a crash left are
    removed once they are old. transformers shows no progress bars from here on: these models take a moment.
    """
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".{path.name}-*"):
        if left.stat().st_mtime < time.time() - _DRAFT_AGE_S:
            shutil.rmtree(left, ignore_errors=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        yield draft
        draft.joinpath(TEMPLATE).write_text(chat_template(), encoding="utf-8")
        for file in draft.iterdir():
            file.chmod(0o644)  # safetensors writes files that only their owner can read
        sums = {file.name: sha256_of(file) for file in sorted(draft.iterdir())}
        record = ModelRecord(name=name, source=source, license=license, files=sums)
        draft.joinpath(RECORD).write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2))
        draft.chmod(0o755)
        if not path.exists():
            os.replace(draft, path)
    finally:
        shutil.rmtree(draft, ignore_errors=True)

"""Which weights folders stay on disk."""

import re
import shutil
import time
from collections.abc import Collection
from pathlib import Path

_FOLDER = re.compile(r"v(\d{6,})-(\d+)")
_DRAFT = re.compile(r"\.v\d{6,}-\d+-.+")
_DRAFT_AGE_S = 3600.0


def keep_newest(root: str | Path, keep: int, in_use: Collection[str | Path] = ()) -> list[Path]:
    """Remove all but the `keep` newest folders of `root` and those `in_use` (paths or names); what was removed.

    Drafts that a crash left are removed once they are an hour old.
    """
    root = Path(root)
    if not root.is_dir():
        return []
    held = {Path(entry).name for entry in in_use}
    folders = sorted((entry for entry in root.iterdir() if _FOLDER.fullmatch(entry.name)), key=_age, reverse=True)
    gone = [folder for folder in folders[max(keep, 1) :] if folder.name not in held]
    oldest_draft = time.time() - _DRAFT_AGE_S
    gone += [entry for entry in root.iterdir() if _DRAFT.fullmatch(entry.name) and entry.stat().st_mtime < oldest_draft]
    for folder in gone:
        shutil.rmtree(_out_of_sight(folder), ignore_errors=True)
    return gone


def _out_of_sight(folder: Path) -> Path:
    """A folder that is being removed is no longer whole, so it loses its name first."""
    if folder.name.startswith("."):
        return folder
    return folder.replace(folder.with_name(f".{folder.name}-removed"))


def _age(folder: Path) -> tuple[int, int]:
    version, incarnation = folder.name[1:].split("-")
    return int(version), int(incarnation)

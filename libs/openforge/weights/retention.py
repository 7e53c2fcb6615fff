"""Which weights folders stay on disk."""

import re
import shutil
import time
from collections.abc import Collection, Iterable
from pathlib import Path

_FOLDER = re.compile(r"(v(\d{6,})-(\d+))(-[0-9a-f]+)?")
_DRAFT = re.compile(r"\.v\d{6,}-\d+-.+")
_DRAFT_AGE_S = 3600.0


def keep_newest(root: str | Path, keep: int, in_use: Collection[str | Path] = ()) -> list[Path]:
    """Remove all but the `keep` newest folders of `root` and those `in_use` (paths or names); what was removed.

    Drafts that a crash left are removed once they are an hour old.
    """
    root = Path(root)
    if not root.is_dir():
        return []
    gone = [root / name for name in superfluous([entry.name for entry in root.iterdir()], keep, in_use)]
    oldest_draft = time.time() - _DRAFT_AGE_S
    gone += [entry for entry in root.iterdir() if _DRAFT.fullmatch(entry.name) and entry.stat().st_mtime < oldest_draft]
    for folder in gone:
        shutil.rmtree(_out_of_sight(folder), ignore_errors=True)
    return gone


def superfluous(names: Iterable[str], keep: int, in_use: Collection[str | Path] = ()) -> list[str]:
    """Of names that stand for versions all but the `keep` newest and those `in_use`; a digest may follow a name."""
    held = {Path(entry).name for entry in in_use}
    versions = [(found, name) for name in names if (found := _FOLDER.fullmatch(name))]
    newest_first = sorted(versions, key=lambda version: (int(version[0][2]), int(version[0][3])), reverse=True)
    return [name for found, name in newest_first[max(keep, 1) :] if found[1] not in held]


def _out_of_sight(folder: Path) -> Path:
    """A folder that is being removed is no longer whole, so it loses its name first."""
    if folder.name.startswith("."):
        return folder
    return folder.replace(folder.with_name(f".{folder.name}-removed"))

"""`openforge env new NAME`: a working environment to change, not an empty one to fill.

Promises: what is written loads, passes `openforge env check`, and overwrites nothing.
"""

import re
import shutil
from pathlib import Path

SCAFFOLD = Path(__file__).parent / "scaffold"
EXAMPLE = "example"

_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")


class CannotCreate(ValueError):
    """There is something in the way, or the name does not do."""


def new_environment(name: str, parent: Path) -> Path:
    """The folder `parent/name` with an environment in it; raises `CannotCreate`."""
    if not _NAME.fullmatch(name):
        raise CannotCreate(f"name = {name!r}: use a lower-case letter, then letters, digits and _")
    folder = parent / name
    if folder.exists():
        raise CannotCreate(f"{folder} is already there: choose another name or remove it")
    shutil.copytree(SCAFFOLD, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in (folder / "env.py", folder / "README.md"):
        file.write_text(_named(file.read_text(), name, folder.resolve()))
    return folder


def _named(text: str, name: str, folder: Path) -> str:
    return text.replace(f"`{EXAMPLE}`", f"`{name}`").replace("PATH-OF-THIS-FOLDER", str(folder))

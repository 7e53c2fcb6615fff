"""`openforge env new NAME`: a working environment to change, not an empty one to fill.

Promises: what is written loads, passes `openforge env check`, and overwrites nothing.
"""

import re
import shutil
from pathlib import Path

from openforge.env.contract import HarnessKind

SCAFFOLD = Path(__file__).parent / "scaffold"
EXAMPLE = "example"

_HARNESS: dict[HarnessKind, str] = {"command": "agent", "pipeline": "agent", "direct": "react"}
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")


class CannotCreate(ValueError):
    """There is something in the way, or the name does not do."""


def new_environment(name: str, parent: Path, kind: HarnessKind = "command") -> Path:
    """The folder `parent/name` with an environment in it whose harness is of `kind`; raises `CannotCreate`."""
    if not _NAME.fullmatch(name):
        raise CannotCreate(f"name = {name!r}: use a lower-case letter, then letters, digits and _")
    folder = parent / name
    if folder.exists():
        raise CannotCreate(f"{folder} is already there: choose another name or remove it")
    agent = SCAFFOLD / "kinds" / kind
    if not agent.is_dir():
        known = ", ".join(sorted(path.name for path in agent.parent.iterdir() if path.is_dir()))
        raise CannotCreate(f"kind = {kind!r}: use one of {known}")
    try:
        _write(folder, name, agent, _HARNESS[kind])
    except OSError as error:
        raise CannotCreate(f"{folder} cannot be written ({error.strerror or error}): name another folder") from error
    return folder


def _write(folder: Path, name: str, agent: Path, harness: str) -> None:
    shutil.copytree(SCAFFOLD, folder, ignore=shutil.ignore_patterns("__pycache__", "kinds", "__init__.py"))
    shutil.copytree(agent, folder, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    for file in (folder / "env.py", folder / "README.md"):
        file.write_text(_named(file.read_text(), name, folder.resolve()).replace("HARNESS-OF-ENV-PY", harness))


def _named(text: str, name: str, folder: Path) -> str:
    return text.replace(f"`{EXAMPLE}`", f"`{name}`").replace("PATH-OF-THIS-FOLDER", str(folder))

"""What of this host's Python an env host may see: the interpreter, the packages and the code, read-only."""

import contextlib
import importlib
import os
import sys
from pathlib import Path

import openforge


def python_folders(environment: str) -> tuple[dict[str, str], list[str]]:
    """(folders to show at their own paths, import roots among them that no prefix holds)."""
    prefixes = [Path(sys.prefix), Path(sys.base_prefix)]
    roots = [root for root in _import_roots(environment) if not _within(root, prefixes)]
    shown = [folder for folder in (*prefixes, *roots) if not _within(folder, [Path("/usr")])]
    return {str(folder): str(folder) for folder in shown}, [str(root) for root in roots]


def _import_roots(environment: str) -> list[Path]:
    """The parents of our packages, what PYTHONPATH names, and the folder of an environment given by path."""
    roots = [Path(part).parent for part in openforge.__path__]
    with contextlib.suppress(ModuleNotFoundError):
        roots += [Path(part).parent for part in importlib.import_module("openforge_envs").__path__]
    roots += [Path(part) for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    place = Path(environment)
    if place.exists() and "/" in environment:
        roots.append(place if place.is_dir() else place.parent)
    return [root for root in dict.fromkeys(root.resolve() for root in roots) if root.is_dir()]


def _within(folder: Path, others: list[Path]) -> bool:
    return any(folder.is_relative_to(other) for other in others)

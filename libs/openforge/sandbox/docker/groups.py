"""Control groups of a container that runs on this host: what ends one command, and what counts memory kills.

Promises: a container whose groups cannot be seen or written from here (a daemon elsewhere, no root) still works;
its commands are then ended by their mark, as `openforge.sandbox.inside.processes` says.
"""

import os
from pathlib import Path

from openforge.sandbox.process.cgroups import (
    FOLDER,
    CommandGroups,
    Hierarchies,
    NoLimits,
    find_hierarchies,
    memory_counter_name,
)


def hierarchies_here() -> Hierarchies | None:
    """This host's control groups, where we may write them."""
    if os.geteuid() != 0:
        return None
    try:
        return find_hierarchies()
    except NoLimits:
        return None


class ContainerGroups(CommandGroups):
    """`own` are the folders that must be removed when the container is gone: none where they lie in its own group."""

    def __init__(self, kill_folder: Path, memory_counter: str, own: tuple[Path, ...]) -> None:
        super().__init__(kill_folder, memory_counter)
        self.own = own


def groups_of(hierarchies: Hierarchies, pid: int, name: str) -> ContainerGroups | None:
    """Those of the container in which `pid` of this host runs; None where they cannot be had.

    Where version 2 limits the container, commands get groups within its own; else (the limits are elsewhere) a group
    of ours holds them, since version 1 has nothing that kills.
    """
    places = _places(pid)
    memory_root = hierarchies.v1.get("memory", hierarchies.v2)
    counter = Path(memory_root + places.get("memory" if "memory" in hierarchies.v1 else "", "")) / memory_counter_name(
        hierarchies
    )
    if hierarchies.v2_limits:
        kill_folder = Path(hierarchies.v2 + places.get("", ""))
        own: tuple[Path, ...] = ()
    else:
        kill_folder = Path(hierarchies.kill_root) / FOLDER / name
        own = (kill_folder,)
    try:
        for folder in own:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return ContainerGroups(kill_folder, str(counter), own) if os.access(kill_folder, os.W_OK) else None


def _places(pid: int) -> dict[str, str]:
    """Controller -> path of its group, `` for version 2."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return {}
    return {name: path for _, names, path in (line.split(":", 2) for line in lines) for name in names.split(",")}

"""What a run has left on this host: processes, mounts, control groups, containers, files.

A run is known by its name, which is part of the names of all its sandboxes, by its folders, and by a mark that its
agents write on the command lines of what they leave behind.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import msgspec

from openforge.sandbox.process.cgroups import find_hierarchies

OWN_NAME = "id"
"""What a driver of containers is called, kept for its next start."""


class Leftovers(msgspec.Struct, frozen=True, kw_only=True):
    processes: tuple[str, ...] = ()
    mounts: tuple[str, ...] = ()
    cgroups: tuple[str, ...] = ()
    containers: tuple[str, ...] = ()
    files: tuple[str, ...] = ()

    @property
    def none(self) -> bool:
        return not any(msgspec.structs.astuple(self))


def left_by(run: str, mark: str, folders: Sequence[Path], docker: Path | None = None) -> Leftovers:
    """`folders` should be empty, or not there; `docker` is the socket of a daemon."""
    words = (run, mark)
    return Leftovers(
        processes=tuple(_processes(words)),
        mounts=tuple(line for line in Path("/proc/self/mounts").read_text().splitlines() if run in line),
        cgroups=tuple(str(place) for place in cgroups_of(run)),
        containers=tuple(_containers(run, docker)) if docker else (),
        files=tuple(
            str(file)
            for folder in folders
            for file in sorted(folder.rglob("*"))
            if not file.is_dir() and file != folder / OWN_NAME
        ),
    )


def cgroups_of(word: str) -> list[Path]:
    """Sandboxes' control groups whose names hold `word`."""
    roots = {*find_hierarchies().v1.values(), find_hierarchies().v2} - {""}
    return [place for root in roots for place in (Path(root) / "openforge").glob(f"*{word}*")]


def _processes(words: Sequence[str]) -> Iterator[str]:
    """Those of other programs that only speak of the run, such as this one, are none of it. Neither are dead ones,
    which the first process of the machine has yet to hear of.
    """
    ours = {os.getpid(), os.getppid()}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            line = (place / "cmdline").read_text(errors="replace").replace("\0", " ")
            groups = (place / "cgroup").read_text()
            state = (place / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state not in "ZX" and int(place.name) not in ours and any(word in line or word in groups for word in words):
            yield f"{place.name} {line[:200]}"


def _containers(run: str, docker: Path) -> Iterator[str]:
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(docker)), base_url="http://docker", timeout=60) as client:
        listed = client.get("/containers/json", params={"all": "true"}).raise_for_status().json()
    for one in listed:
        if run in str(one.get("Labels")) or run in str(one.get("Names")):
            yield f"{one['Id'][:12]} {one['State']}"

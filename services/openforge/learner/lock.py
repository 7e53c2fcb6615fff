"""One learner for each folder: a second one started by mistake ends before it has cost anything.

The fence on `BatchTrained` is what protects the lineage; this only says it sooner.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from openforge.service import Zombie


@contextmanager
def only_one(home: Path) -> Iterator[None]:
    """Holds the folder until the process ends, however it ends; raises `Zombie`."""
    home.mkdir(parents=True, exist_ok=True)
    with (home / "learner.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Zombie(f"another learner works in {home}: this one was started by mistake") from None
        yield

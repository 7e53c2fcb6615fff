"""Telling a recorded run again.

Promises: the bytes are what they were, in the order in which they were told. A learner that trains it anew is told no
verdict of a version that it has not trained yet, as in the run itself.
"""

import asyncio
from pathlib import Path

from openforge.bus import KINDS, Bus
from openforge.bus.envelope import decode
from openforge.cli.archive.facts import Record, facts_in
from openforge.protos import BatchTrained, TrajectoryVerified

_AT_ONCE = 256
_LOOK_S = 0.1


async def tell_all(bus: Bus, folder: Path) -> int:
    """Every fact; how many there are."""
    return len(await bus.tell_again((record.subject, record.data) for record in facts_in(folder)))


async def tell_as_it_is_trained(bus: Bus, folder: Path, run: str) -> int:
    """Everything but what learner and engine told, each verdict when the learner on this bus has come so far."""
    told, trained = 0, 0
    waiting: list[tuple[str, bytes]] = []
    for record in facts_in(folder, [kind for kind in KINDS if kind != "policy"]):
        newest = _newest_version(record)
        if newest > trained or len(waiting) >= _AT_ONCE:
            told += len(await bus.tell_again(waiting))
            waiting.clear()
        while newest > trained:
            if await bus.find(BatchTrained, run, newest) is not None:
                trained = newest
            else:
                await asyncio.sleep(_LOOK_S)
        waiting.append((record.subject, record.data))
    return told + len(await bus.tell_again(waiting))


def _newest_version(record: Record) -> int:
    """The newest version that sampled a token of a verdict; 0 for any other fact."""
    if record.subject.split(".", 3)[2] != "trajectory":
        return 0
    fact = decode(record.subject, record.data)
    assert isinstance(fact, TrajectoryVerified)
    return max((span.version for sequence in fact.sequences for span in sequence.versions), default=0)

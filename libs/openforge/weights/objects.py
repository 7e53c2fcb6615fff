"""Files by name in a place that learner and engines reach over the network, and what can go wrong there.

Promises of every such place: a name that is listed is whole; `read` and `get` give what was put, as far as the place
can tell, or raise. Whether it is what a manifest says is for who reads.
"""

from pathlib import Path
from typing import Protocol

from openforge.bus.settings import BadSettings


class StoreRefused(BadSettings):
    """The place will not take or give this, however often it is asked: somebody has to change something."""


class StoreBroken(Exception):
    """It did not work this time and may work the next."""


class ObjectLost(Exception):
    """There is nothing of that name."""


class Objects(Protocol):
    """Names have parts separated by `/`, of which the first is the run's. All methods raise `StoreRefused` and
    `StoreBroken`."""

    url: str

    async def check(self, run: str) -> None:
        """Whether what a learner does can be done here: raises `StoreRefused` or `StoreBroken` if not."""
        ...

    async def names(self, prefix: str) -> list[str]:
        """Everything whole whose name begins so."""
        ...

    async def put(self, name: str, file: Path) -> None: ...

    async def read(self, name: str) -> bytes:
        """Something small; raises `ObjectLost`."""
        ...

    async def get(self, name: str, into: Path, size: int) -> None:
        """Something of `size` bytes. What `into` holds may be its beginning, from a try that broke off; raises
        `ObjectLost`."""
        ...

    async def delete(self, name: str) -> None:
        """Fine if it is not there."""
        ...

    async def sweep(self, run: str) -> None:
        """Remove what puts of this run left that were never ended. Nobody else may be putting for the run."""
        ...

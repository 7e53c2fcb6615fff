"""The one way out of a sandbox: its loopback port, carried to the model proxy's UNIX socket.

The listening socket was opened inside the sandbox's network and handed out, so nothing inside can be
killed or replaced to change where it leads. A proxy that is away for a moment is waited for.
"""

import asyncio
import contextlib
from pathlib import Path

from openforge.sandbox.door import Door, pump

PATIENCE_S = 60.0
"""How long a connection waits for a proxy that is being started again."""


class Forwarder(Door):
    def __init__(self, target: Path) -> None:
        super().__init__()
        self._target = target

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await connected(self._target)
        try:
            back = asyncio.create_task(pump(there_reader, writer))
            try:
                await pump(reader, there_writer)
                await back
            finally:
                back.cancel()
                with contextlib.suppress(asyncio.CancelledError, OSError):
                    await back
        finally:
            there_writer.close()


async def connected(path: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to the socket, as soon as somebody listens there; raises `OSError` when that takes too long."""
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    while True:
        try:
            return await asyncio.open_unix_connection(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            if asyncio.get_running_loop().time() > deadline:
                raise
            await asyncio.sleep(0.05)

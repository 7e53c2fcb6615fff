"""The line between manager and env host where they share no folder: a terminal of the host's own sandbox.

Promises: bytes pass as they are, in both directions; what else the host's process prints goes to a file in its sandbox
and never onto the line; the line ends when either side does.
"""

import asyncio
import os
import sys
import tty
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from openforge.sandbox.contract import Box, SandboxLost, Terminal

_LOG = "/tmp/env-host.log"
_ERRORS_TO_LOG = ("/bin/sh", "-c", f'exec "$@" 2>{_LOG}', "env-host")


class TerminalWriter:
    """The manager's end, as far as `wire.send` needs it."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._held = bytearray()

    def write(self, data: bytes) -> None:
        self._held += data

    async def drain(self) -> None:
        held, self._held = bytes(self._held), bytearray()
        await self._terminal.write(held)

    def close(self) -> None:
        """Its terminal is closed by whoever opened it."""


@asynccontextmanager
async def on_terminal(
    box: Box, argv: Sequence[str], env: Mapping[str, str]
) -> AsyncIterator[tuple[asyncio.StreamReader, TerminalWriter]]:
    """The command on a terminal of the box for the time of the block; raises `SandboxLost`."""
    terminal = await box.terminal([*_ERRORS_TO_LOG, *argv], cwd="/tmp", env=env)
    reader = asyncio.StreamReader()
    carrying = asyncio.create_task(_carry(terminal, reader))
    try:
        yield reader, TerminalWriter(terminal)
    finally:
        carrying.cancel()
        await terminal.close()


async def _carry(terminal: Terminal, reader: asyncio.StreamReader) -> None:
    while data := await terminal.read():
        reader.feed_data(data)
    reader.feed_eof()


async def last_words(box: Box) -> str:
    """What the host said beside the line."""
    try:
        said = await box.exec(f"tail -c 2000 {_LOG}", timeout_s=10.0, cwd="/tmp")
    except SandboxLost as error:
        return str(error)
    return said.stdout.decode(errors="replace").strip()


def take_own_terminal() -> tuple[int, int]:
    """In the host, before anything is printed: standard input and output become the line and nobody else's."""
    line = os.dup(0), os.dup(1)
    tty.setraw(line[0])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return line


async def open_line(line: tuple[int, int]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await loop.connect_read_pipe(lambda: protocol, os.fdopen(line[0], "rb", 0))
    transport, flow = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, os.fdopen(line[1], "wb", 0))
    return reader, asyncio.StreamWriter(transport, flow, None, loop)

"""Things of the host that an agent would like to have, made for one module of tests: a secret file that everybody
may read, a process that carries secrets, servers on every kind of address, a control group.
"""

import asyncio
import contextlib
import ctypes
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from attacks.attack import Stakes
from openforge.sandbox.process.cgroups import find_hierarchies

_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.asynccontextmanager
async def laid_out() -> AsyncIterator[Stakes]:
    secret = f"swordfish-{secrets.token_hex(8)}"
    folder = Path(tempfile.mkdtemp(prefix="stakes-", dir="/tmp"))
    folder.chmod(0o755)
    file = folder / "secret"
    file.write_text(secret)
    _setuid_program(folder / "setuid")
    memory = Path(tempfile.mkdtemp(prefix="stakes-", dir="/dev/shm"))
    group = _group()
    carrier = _carrier(secret)
    servers = _Servers()
    stakes = Stakes(
        secret=secret,
        folder=folder,
        file=file,
        handle=_handle_of(file),
        socket=folder / "daemon.sock",
        abstract=f"stakes-{secrets.token_hex(4)}",
        port=0,
        datagrams=0,
        group=group,
        memory=memory,
        addresses=_addresses(),
    )
    try:
        await servers.start(stakes)
        yield stakes
    finally:
        servers.stop()
        carrier.kill()
        carrier.wait()
        group.rmdir()
        shutil.rmtree(memory)
        shutil.rmtree(folder)


def _carrier(secret: str) -> "subprocess.Popen[bytes]":
    """A process of the host with the secret in its environment and on its command line."""
    sleep = "import time; time.sleep(3600)"
    return subprocess.Popen([sys.executable, "-I", "-S", "-c", sleep, secret], env={"SECRET": secret})


def _setuid_program(folder: Path) -> None:
    folder.mkdir()
    shutil.copy("/usr/bin/id", folder / "id")
    (folder / "id").chmod(0o4755)


def _group() -> Path:
    found = find_hierarchies()
    group = Path(found.v1.get("pids", found.v2)) / f"stakes-{secrets.token_hex(4)}"
    group.mkdir()
    return group


def _addresses() -> list[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as trial:
        try:
            trial.connect(("203.0.113.1", 9))  # sends nothing: asks which address it would leave by
            outer = [str(trial.getsockname()[0])]
        except OSError:
            outer = []
    return ["127.0.0.1", *outer]


def _handle_of(file: Path) -> str:
    """By which the file can be opened from any mount of its file system, by whoever may."""
    buffer = ctypes.create_string_buffer((128).to_bytes(4, sys.byteorder) + bytes(132))
    mount = ctypes.c_int()
    if _libc.name_to_handle_at(-100, str(file).encode(), buffer, ctypes.byref(mount), 0):
        return ""
    return buffer.raw[: 8 + int.from_bytes(buffer.raw[:4], sys.byteorder)].hex()


class _Servers:
    """Each answers everybody with the secret and notes who asked."""

    def __init__(self) -> None:
        self._servers: list[asyncio.Server] = []
        self._datagrams: asyncio.DatagramTransport | None = None

    async def start(self, stakes: Stakes) -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            stakes.seen.append(await reader.read(4096))
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + stakes.secret.encode())
            writer.close()

        tcp = await asyncio.start_server(answer, "0.0.0.0", 0)
        unix = await asyncio.start_unix_server(answer, path=str(stakes.socket))
        abstract = await asyncio.start_unix_server(answer, path=f"\0{stakes.abstract}")
        stakes.socket.chmod(0o777)
        self._servers = [tcp, unix, abstract]
        stakes.port = tcp.sockets[0].getsockname()[1]
        self._datagrams, _ = await asyncio.get_running_loop().create_datagram_endpoint(
            lambda: _Listening(stakes), local_addr=("127.0.0.1", 0)
        )
        stakes.datagrams = self._datagrams.get_extra_info("sockname")[1]

    def stop(self) -> None:
        for server in self._servers:
            server.close()
        if self._datagrams is not None:
            self._datagrams.close()


class _Listening(asyncio.DatagramProtocol):
    def __init__(self, stakes: Stakes) -> None:
        self._stakes = stakes

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self._stakes.seen.append(data)

"""Our end of the launcher process: started once, asked for each sandbox."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from openforge.sandbox.contract import SandboxLost

_START_S = 20.0


class Starter:
    def __init__(self, stage_folder: str) -> None:
        self._stage_folder = stage_folder
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._ready: asyncio.Future[None] | None = None
        self._waiting: dict[str, asyncio.Future[int]] = {}

    async def start_sandbox(
        self,
        name: str,
        argv: list["str | dict[str, str]"],
        *,
        uid: int,
        entries: list[str],
        seccomp: str,
        fds: list[int],
    ) -> int:
        """The pid of the sandbox's outermost process; raises `SandboxLost`."""
        sock = await self._launcher()
        started: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting[name] = started
        request = {"id": name, "argv": argv, "uid": uid, "entries": entries, "seccomp": seccomp}
        try:
            socket.send_fds(sock, [json.dumps(request).encode()], fds)
            async with asyncio.timeout(_START_S):
                return await started
        except (OSError, TimeoutError) as error:
            raise SandboxLost(f"the launcher of sandboxes did not answer: {error}") from error
        finally:
            self._waiting.pop(name, None)

    def kill(self, pid: int) -> None:
        if self._sock is not None:
            self._sock.send(json.dumps({"kill": pid}).encode())

    def close(self) -> None:
        self._lose("the launcher was closed")
        if self._process is not None:
            self._process.wait()  # it ends with its socket
            self._process = None

    async def _launcher(self) -> socket.socket:
        if self._sock is None:
            self._spawn()
        assert self._ready is not None
        assert self._sock is not None
        sock = self._sock
        async with asyncio.timeout(_START_S):
            await asyncio.shield(self._ready)
        return sock

    def _spawn(self) -> None:
        if self._process is not None:
            self._process.wait()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        program = Path(__file__).with_name("launcher.py")
        python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
        self._process = subprocess.Popen(
            [python, "-I", "-S", str(program), str(theirs.fileno()), self._stage_folder],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            env={},
            cwd="/",
            start_new_session=True,  # a Ctrl-C at a terminal is its owner's business
        )
        theirs.close()
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        self._sock, self._ready = ours, loop.create_future()
        loop.add_reader(ours, self._hear)

    def _hear(self) -> None:
        assert self._sock is not None
        try:
            data = self._sock.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose("the launcher of sandboxes died")
            return
        reply: dict[str, Any] = json.loads(data)
        if "ready" in reply:
            assert self._ready is not None
            self._ready.set_result(None)
            return
        started = self._waiting.pop(reply["id"], None)
        if started is None or started.done():
            return
        if "error" in reply:
            started.set_exception(SandboxLost(reply["error"]))
        else:
            started.set_result(reply["pid"])

    def _lose(self, why: str) -> None:
        if self._sock is None:
            return
        asyncio.get_running_loop().remove_reader(self._sock)
        self._sock.close()
        self._sock = None
        assert self._ready is not None
        waiting: list[asyncio.Future[Any]] = [self._ready, *self._waiting.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(SandboxLost(why))
                future.exception()
        self._waiting.clear()

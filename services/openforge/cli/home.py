"""The folder of a run on one machine: `runs/<run>`, and who may write there.

Promises: one supervisor at a time; what others need to find the run's bus stands in `bus.json`.
"""

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from openforge.bus import BusSettings
from openforge.bus.credentials import Credentials
from openforge.bus.permissions import OPERATOR
from openforge.sandbox.process.records import start_time


class Unusable(Exception):
    """The folder of the run cannot be used; the message says what to do."""


class Busy(Unusable):
    """Another supervisor holds the run."""


class BusAddress(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach the bus of a running run, its engine and its proxy: `pid` is its supervisor, and `started` since
    when, so that another process of that number is not taken for it."""

    nats_url: str
    pid: int
    started: str = ""
    engine_url: str = ""
    proxy_url: str = ""


class Home:
    """`root` is `runs/<run>`, under OPENFORGE_RUNS or the working folder."""

    def __init__(self, run: str, runs: Path | None = None) -> None:
        self.run = run
        self.root = ((runs or Path(os.environ.get("OPENFORGE_RUNS", "runs"))) / run).resolve()

    @property
    def nats(self) -> Path:
        return self.root / "nats"

    @property
    def keys(self) -> Path:
        """Credentials of the run's own bus, for its owner only."""
        return self.root / "keys"

    @property
    def blobs(self) -> Path:
        return self.root / "blobs"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def health(self) -> Path:
        return self.root / "health"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def sockets(self) -> Path:
        """A short path, since a UNIX socket's is limited to about 100 bytes."""
        short = hashlib.sha256(str(self.root).encode()).hexdigest()[:8]
        return Path(tempfile.gettempdir()) / f"openforge-{short}"

    def credentials(self) -> Credentials:
        """Of the run's own server: one seed for each service, for the owner of the folder only."""
        return Credentials(self.keys, run=self.run)

    def bus_settings(self, url: str) -> BusSettings:
        """How the owner reaches the run's own server at `url`. One that an older version started lets everybody in."""
        seed = self.credentials().seed(OPERATOR)
        settings = msgspec.structs.replace(BusSettings.from_env(), url=url, blobs=str(self.blobs))
        return msgspec.structs.replace(settings, nkey_seed_file=str(seed), creds="") if seed.exists() else settings

    def make(self) -> None:
        """Make the folders; raises `Unusable`."""
        with _writable(self.root):
            for folder in (self.nats, self.blobs, self.logs, self.health, self.sockets):
                folder.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Holds the run for this process; raises `Busy`, or `Unusable` where nothing can be written."""
        with _writable(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            held = (self.root / "lock").open("w")
        with held as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Busy(
                    f"run {self.run!r} is already being worked on by another process ({self.root / 'lock'}): "
                    f"watch it with 'openforge status {self.run}' or end it with 'openforge stop {self.run}'"
                ) from None
            yield

    def tell_address(self, address: BusAddress) -> None:
        _replace(self.root / "bus.json", msgspec.json.encode(address))

    def address(self) -> BusAddress | None:
        """Where the run's bus is, if its supervisor is alive."""
        try:
            address = msgspec.json.decode((self.root / "bus.json").read_bytes(), type=BusAddress)
            os.kill(address.pid, 0)
        except (FileNotFoundError, NotADirectoryError, ProcessLookupError, msgspec.DecodeError):
            return None  # a supervisor that works wrote a file that can be read
        except PermissionError:
            pass
        return None if address.started and start_time(address.pid) != address.started else address

    def forget_address(self) -> None:
        (self.root / "bus.json").unlink(missing_ok=True)


@contextmanager
def _writable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Unusable(
            f"the folder of the run, {folder}, cannot be written ({error.strerror}): make it writable, "
            "or set OPENFORGE_RUNS to a folder of runs that is"
        ) from error


def _replace(path: Path, data: bytes) -> None:
    scratch = path.with_suffix(".tmp")
    scratch.write_bytes(data)
    scratch.replace(path)

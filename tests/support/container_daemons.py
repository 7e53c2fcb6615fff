"""A real dockerd and a real podman for tests, with an image made from this host's programs. Ended by their pid.

Nothing is fetched from a registry, no bridge and no firewall rule is made. `OPENFORGE_REQUIRE_SANDBOXES` turns a
daemon that cannot be started from a skipped test into a failed one.
"""

import io
import os
import shutil
import socket
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import httpx
from needed import cannot

IMAGE = "localhost/openforge-test:latest"  # Podman imports under no other tag
_START_S = 60.0
_PROGRAMS = (
    "bash", "sh", "cat", "chmod", "cp", "cut", "date", "dd", "echo", "env", "false", "find", "grep", "head", "id", "ln",
    "ls", "mkdir", "mkfifo", "mount", "mv", "nproc", "printf", "ps", "pwd", "python3",
    "readlink", "rm", "sed", "seq", "setsid",
    "sleep", "sort", "stat", "stty", "tail", "tar", "touch", "tr", "true", "truncate", "tty", "uname", "uniq",
    "unshare", "wc", "whoami", "xargs",
)  # fmt: skip
_ETC = {
    "passwd": "root:x:0:0:root:/:/bin/sh\nagent:x:1000:1000:agent:/workspace:/bin/sh\n",
    "group": "root:x:0:\nagent:x:1000:\n",
}


class Daemons:
    """Started when first asked for, with `IMAGE` where it is wanted; `stop` ends all of them.

    `in_memory` keeps their images and containers in memory, where many files are made and removed.
    """

    def __init__(self, *, with_image: bool = True, in_memory: bool = False) -> None:
        self._with_image = with_image
        self._in_memory = in_memory
        self._folder = Path(tempfile.mkdtemp(prefix="ofd-", dir="/tmp"))  # paths of sockets must be short
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def socket(self, name: str) -> Path:
        place = self._folder / name / "api.sock"
        if name not in self._running:
            self._start(name, place)
        return place

    def stop(self) -> None:
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            process.wait(timeout=30)
        self._unmount()
        shutil.rmtree(self._folder, ignore_errors=True)

    def kill_and_start(self, name: str) -> int:
        """SIGKILL one, and start it again with what it had."""
        killed = self._running[name]
        killed.kill()
        killed.wait(timeout=30)
        place = self._folder / name / "api.sock"
        own = place.parent / "exec" / "containerd" / "containerd.pid"
        _await_death(own)
        for stale in (place, place.parent / "pid", own):
            stale.unlink(missing_ok=True)
        self._launch(name, place)
        return killed.pid

    def _start(self, name: str, place: Path) -> None:
        place.parent.mkdir()
        _demand(name)
        if self._in_memory:
            (place.parent / "data").mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8g", "tmpfs", place.parent / "data"], check=True)
        self._launch(name, place)
        if self._with_image:
            import_image(place, IMAGE, host_tree())

    def _launch(self, name: str, place: Path) -> None:
        folder = place.parent
        line, env = {"docker": _dockerd, "podman": _podman}[name](folder, place)
        log = folder / "log"
        with log.open("ab") as out:
            self._running[name] = subprocess.Popen(
                line, stdout=out, stderr=out, env={**os.environ, **env}, start_new_session=True, cwd=folder
            )
        self._await_answer(name, place, log)

    def _await_answer(self, name: str, place: Path, log: Path) -> None:
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline and self._running[name].poll() is None:
            if _listens(place) and _answers(place):
                return
            time.sleep(0.1)
        cannot(f"{name} did not start: {log.read_text(errors='replace')[-600:]}")

    def _unmount(self) -> None:
        """A daemon leaves its own mount of its data folder behind."""
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for place in sorted((place for place in mounts if place.startswith(f"{self._folder}/")), reverse=True):
            subprocess.run(["umount", "-l", place], check=False)


class KilledAndRestarted:
    """A dockerd that may be killed: it is started again at once, with the same data."""

    def __init__(self) -> None:
        self._daemons = Daemons()
        self.socket = self._daemons.socket("docker")

    def kill(self) -> int:
        """SIGKILL; the number of the process that was killed."""
        return self._daemons.kill_and_start("docker")

    def stop(self) -> None:
        self._daemons.stop()


def running_daemons() -> Iterator[Daemons]:
    daemons = Daemons()
    try:
        yield daemons
    finally:
        daemons.stop()


def _demand(name: str) -> None:
    program = {"docker": "dockerd", "podman": "podman"}[name]
    if os.geteuid() != 0:
        cannot(f"{program} is started by root only")
    if shutil.which(program) is None:
        cannot(f"{program} is not installed: `make containers` installs it as root on Debian")


def _dockerd(folder: Path, place: Path) -> tuple[list[str], dict[str, str]]:
    line = ["dockerd", "--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec", "--pidfile", f"{folder}/pid"]
    network = ["--iptables=false", "--ip6tables=false", "--ip-forward=false", "--bridge=none"]
    return [*line, "-H", f"unix://{place}", *network], {}


def _podman(folder: Path, place: Path) -> tuple[list[str], dict[str, str]]:
    """`runc`, since crun refuses hybrid hosts; limits that are not above this host's own."""
    (folder / "storage.conf").write_text(
        f'[storage]\ndriver = "overlay"\ngraphroot = "{folder}/data"\nrunroot = "{folder}/run"\n'
    )
    (folder / "containers.conf").write_text(
        '[containers]\ndefault_ulimits = ["nofile=20000:20000", "nproc=32768:32768"]\n'
        '[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
        f'tmp_dir = "{folder}/tmp"\n[network]\nnetwork_backend = "netavark"\n'
    )
    env = {
        "CONTAINERS_STORAGE_CONF": f"{folder}/storage.conf",
        "CONTAINERS_CONF": f"{folder}/containers.conf",
    }
    return ["podman", "system", "service", "--time=0", f"unix://{place}"], env


def _listens(place: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as trial:
        return trial.connect_ex(str(place)) == 0


def _await_death(pid_file: Path, within_s: float = 20.0) -> None:
    """A dockerd takes its containerd with it, and the next one would wait for it in vain."""
    if not pid_file.exists():
        return
    stat = Path("/proc", pid_file.read_text().strip(), "stat")
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline and stat.exists() and ") Z " not in stat.read_text():
        time.sleep(0.05)


def _answers(place: Path) -> bool:
    """A daemon that begins may accept a connection and drop it."""
    try:
        with _client(place) as client:
            return client.get("/_ping").is_success
    except httpx.TransportError:
        return False


def _client(place: Path) -> httpx.Client:
    return httpx.Client(transport=httpx.HTTPTransport(uds=str(place)), base_url="http://engine", timeout=600)


def import_image(place: Path, image: str, tree: bytes | Iterable[bytes], env: Sequence[str] = ()) -> None:
    """A root file system, as a tar, becomes an image."""
    name, _, tag = image.rpartition(":")
    params = {"fromSrc": "-", "repo": name, "tag": tag, "changes": [f"ENV {pair}" for pair in env]}
    with _client(place) as client:
        reply = client.post("/images/create", params=params, content=tree, headers=_TAR)
    reply.raise_for_status()
    assert "error" not in reply.text, reply.text


_TAR = {"Content-Type": "application/x-tar"}


def host_tree() -> bytes:
    """A tar of the programs that tests use and the libraries they need, where Debian keeps them."""
    files = {Path(found) for name in _PROGRAMS if (found := shutil.which(name, path="/usr/bin:/bin:/usr/sbin"))}
    listed = subprocess.run(["ldd", *map(str, files)], capture_output=True, text=True, check=False).stdout
    files |= {Path(word) for word in listed.split() if word.startswith("/") and not word.endswith(":")}
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for link in ("bin", "sbin", "lib", "lib64"):
            _add(tar, link, kind=tarfile.SYMTYPE, link=f"usr/{link}")
        for folder in (
            "usr/bin",
            "usr/sbin",
            "usr/lib",
            "usr/lib64",
            "tmp",
            "proc",
            "sys",
            "dev",
            "run",
            "root",
            "etc",
        ):
            _add(tar, folder, kind=tarfile.DIRTYPE)
        for file in sorted(files):
            name = str(file).lstrip("/")
            name = name if name.startswith("usr/") else f"usr/{name}"
            _add(tar, name, data=file.read_bytes())
        for file in _python_files():
            _add(tar, str(file).lstrip("/"), data=file.read_bytes(), mode=0o644)
        for name, text in _ETC.items():
            _add(tar, f"etc/{name}", data=text.encode(), mode=0o644)
        _add(tar, "etc/shadow", data=b"root:*:1::::::\n", mode=0o600)
    return out.getvalue()


def _python_files() -> list[Path]:
    """The library of this host's own Python, for services that are written in it."""
    show = "import os; print(os.path.dirname(os.__file__))"
    told = subprocess.run(["/usr/bin/python3", "-I", "-c", show], capture_output=True, text=True, check=True)
    library = Path(told.stdout.strip())
    return [file for file in library.rglob("*") if file.is_file() and file.suffix in (".py", ".so")]


def _add(
    tar: tarfile.TarFile,
    name: str,
    *,
    kind: bytes = tarfile.REGTYPE,
    link: str = "",
    data: bytes = b"",
    mode: int = 0o755,
) -> None:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size, info.mode = kind, link, len(data), mode
    tar.addfile(info, io.BytesIO(data))

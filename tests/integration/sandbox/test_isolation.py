"""What an agent may try against its sandbox, its host and its neighbours, and what comes of it."""

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from needed import needs
from sandbox_drivers import SMALL, full_driver

from openforge.sandbox.contract import ExecResult, Sandbox, SandboxLimits, SandboxSpec
from openforge.sandbox.process import ProcessDriver

pytestmark = pytest.mark.asyncio(loop_scope="module")
NEEDS_PYTHON = needs("/usr/bin/python3")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def driver(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ProcessDriver]:
    made = full_driver(tmp_path_factory.mktemp("state"))
    yield made
    await made.close()


@pytest_asyncio.fixture(loop_scope="module")
async def box(driver: ProcessDriver) -> AsyncIterator[Sandbox]:
    made = await driver.create(SandboxSpec(name="box", limits=SMALL))
    yield made
    await made.stop()


async def sh(box: Sandbox, command: str, timeout_s: float = 60.0) -> ExecResult:
    return await box.exec(["/bin/bash", "-c", command], timeout_s=timeout_s)


async def alive(box: Sandbox) -> bool:
    return (await sh(box, "echo alive")).stdout == b"alive\n"


async def test_it_is_nobody_on_the_host_and_has_no_power(box: Sandbox) -> None:
    status = (await sh(box, "cat /proc/self/status")).stdout.decode()
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert fields["Uid"].split() == ["1000"] * 4
    assert {fields[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert fields["NoNewPrivs"] == "1"
    assert fields["Seccomp"] == "2"


async def test_each_sandbox_has_a_host_user_of_its_own(driver: ProcessDriver) -> None:
    boxes = [await driver.create(SandboxSpec(name=f"u{n}", limits=SMALL)) for n in range(3)]
    asked = "grep ' /workspace ' /proc/self/mounts | grep -o ',uid=[0-9]*'"
    owners = {(await sh(box, asked)).stdout for box in boxes}
    assert len(owners) == 3
    assert b",uid=0\n" not in owners
    for box in boxes:
        await box.stop()


@pytest.mark.parametrize(
    "path",
    [
        "/etc/shadow",
        "/root/*",
        "/home/*",
        "/var/run/docker.sock",
        "/run/docker.sock",
        "/sys/*",
        "/work",
        "/mnt",
        "/boot",
        "/srv",
    ],
)
async def test_nothing_of_the_host_is_there_but_programs(box: Sandbox, path: str) -> None:
    assert (await sh(box, f"ls -d {path}")).exit_code != 0


async def test_the_host_is_not_reached_by_way_of_proc(box: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s3cret")
    secret = f"{tmp_path}/secret"
    tried = f"cat /proc/1/root{secret} /proc/self/root{secret} ../../../..{secret}; ls /proc/1/fd /proc/1/cwd/"
    result = await sh(box, tried)
    assert b"s3cret" not in result.stdout
    assert result.exit_code != 0


async def test_programs_and_settings_cannot_be_written(box: Sandbox) -> None:
    for path in (
        "/usr/bin/x",
        "/etc/passwd",
        "/bin/x",
        "/x",
        "/run/openforge/x",
        "/run/x",
        "/dev/x",
        "/var/x",
        "/home/x",
    ):
        assert (await sh(box, f"echo x > {path}")).exit_code != 0, path


@pytest.mark.parametrize(
    "attempt",
    [
        "unshare -U true",
        "unshare -r true",
        "unshare -n true",
        "mount -t tmpfs none /tmp",
        "nsenter -t 1 -m true",
        "cat /proc/1/environ",
        "cat /proc/1/maps",
        "cat /proc/1/mem",
        "echo 1 > /proc/sys/kernel/panic",
        "echo h > /proc/sysrq-trigger",
        "mknod /tmp/disk b 8 0",
        "chroot / true",
        "dmesg",
        "date -s 2001-01-01",
    ],
)
async def test_what_reaches_for_the_kernel_is_refused(box: Sandbox, attempt: str) -> None:
    assert (await sh(box, attempt)).exit_code != 0


SYSCALL = """
import ctypes, os, socket
libc = ctypes.CDLL(None, use_errno=True)
def call(*arguments):
    return -1 if libc.syscall(*arguments) == -1 else 0
assert call(435, 0, 0) == -1 and ctypes.get_errno() == 38, "clone3"
assert call(56, 0x10000000 | 17, 0, 0, 0, 0) == -1, "clone with a user namespace"
assert call(101, 16, 1, 0, 0) == -1, "ptrace"
assert call(425, 8, 0) == -1, "io_uring"
assert call(321, 0, 0, 0) == -1, "bpf"
assert call(250, 0, 0, 0, 0, 0) == -1, "keyctl"
for family in (socket.AF_VSOCK, socket.AF_PACKET, socket.AF_ALG, 44):
    try:
        socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        assert error.errno in (97, 1), (family, error)
    else:
        raise SystemExit(f"family {family}")
import threading
threading.Thread(target=print, args=("threads still start",)).start()
"""


@NEEDS_PYTHON
async def test_forbidden_system_calls_fail_and_threads_still_start(box: Sandbox) -> None:
    result = await box.exec(["/usr/bin/python3", "-c", SYSCALL], timeout_s=20)
    assert (result.exit_code, result.stdout) == (0, b"threads still start\n"), result.stderr


async def test_no_network_but_loopback(box: Sandbox) -> None:
    assert (await sh(box, "ls /proc/sys/net/ipv4/conf")).stdout.split() == [b"all", b"default", b"lo"]
    for address in ("169.254.169.254/80", "1.1.1.1/53", "127.0.0.1/22", "127.0.0.1/8080"):
        assert (await sh(box, f"echo > /dev/tcp/{address}", timeout_s=5)).exit_code != 0, address


async def test_neighbours_do_not_see_each_other(driver: ProcessDriver, box: Sandbox) -> None:
    other = await driver.create(SandboxSpec(name="neighbour", limits=SMALL))
    await sh(other, "echo mine > /tmp/file; echo mine > /dev/shm/file; (sleep 7777 >/dev/null 2>&1 &)")
    assert (
        await sh(box, "cat /tmp/file /dev/shm/file; cat /proc/[0-9]*/cmdline | grep -a 'sleep.777[7]'")
    ).stdout == b""
    await sh(box, "kill -9 -1")
    assert b"7777" in (await sh(other, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).stdout
    await other.stop()


async def test_running_out_of_memory_ends_the_command_alone(box: Sandbox) -> None:
    await sh(box, "(sleep 8888 >/dev/null 2>&1 &)")
    result = await sh(box, "x=$(head -c 400000000 /dev/zero | tr '\\0' x)")
    assert result.out_of_memory
    assert result.exit_code in (-9, 137)
    assert not (await sh(box, "true")).out_of_memory
    assert b"8888" in (await sh(box, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).stdout


async def test_many_small_processes_that_fill_the_memory_do_not_take_the_sandbox_with_them(box: Sandbox) -> None:
    hog = "for i in $(seq 50); do (x=$(head -c 8000000 /dev/zero | tr '\\0' x); sleep 5) & done; wait"
    await sh(box, hog, timeout_s=10)
    assert await alive(box)


async def test_a_fork_bomb_ends_with_its_time(box: Sandbox) -> None:
    result = await sh(box, "bomb() { bomb | bomb & }; bomb; sleep 60", timeout_s=1.5)
    assert result.timed_out
    assert await alive(box)
    assert len((await sh(box, "ls -d /proc/[0-9]*")).stdout.split()) < 10


@pytest.mark.parametrize("folder", ["/workspace", "/tmp", "/dev/shm", "/tests"])
async def test_a_full_folder_says_so_and_nothing_else_happens(box: Sandbox, folder: str) -> None:
    result = await sh(box, f"head -c 300000000 /dev/zero > {folder}/fill")
    assert b"No space left on device" in result.stderr
    assert not result.out_of_memory
    await sh(box, f"rm {folder}/fill")
    assert await alive(box)


async def test_millions_of_empty_files_end_nobody_else(box: Sandbox) -> None:
    await sh(box, "for i in $(seq 200000); do : > /tmp/f$i || break; done", timeout_s=4)
    assert await alive(box)


async def test_the_cpu_share_is_kept(driver: ProcessDriver) -> None:
    box = await driver.create(SandboxSpec(name="slow", limits=SandboxLimits(memory_mb=192, disk_mb=16, cpus=0.2)))
    result = await sh(box, "timeout 3 sh -c 'while :; do :; done'; times")
    of_children = result.stdout.decode().splitlines()[-1]
    used_s = sum(int(m) * 60 + float(s) for m, s in re.findall(r"(\d+)m([\d.]+)s", of_children))
    assert 0.01 < used_s < 3 * 0.2 * 1.5
    await box.stop()


# The one way out.


class Upstream:
    """A server on a UNIX socket that says what it heard."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, path=str(self._path))

    def stop(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = await reader.read()
        writer.write(b"heard %d bytes\n" % len(data))
        await writer.drain()
        writer.close()


@pytest_asyncio.fixture(loop_scope="module")
async def way_out(tmp_path: Path) -> AsyncIterator[tuple[Sandbox, Upstream]]:
    upstream = Upstream(tmp_path / "p.sock")
    await upstream.start()
    driver = full_driver(tmp_path / "state", tmp_path / "p.sock")
    box = await driver.create(SandboxSpec(name="out", limits=SMALL, network="proxy-only", proxy_port=8080))
    yield box, upstream
    await driver.close()
    upstream.stop()


async def half_closed(box: Sandbox) -> ExecResult:
    script = (
        "import socket; s = socket.create_connection(('127.0.0.1', 8080)); s.sendall(b'x' * 300000);"
        " s.shutdown(1); print(s.recv(100).decode(), end='')"
    )
    return await box.exec(["/usr/bin/python3", "-c", script], timeout_s=20)


@NEEDS_PYTHON
async def test_the_proxy_is_the_only_thing_that_can_be_reached(way_out: tuple[Sandbox, Upstream]) -> None:
    box, upstream = way_out
    assert (await half_closed(box)).stdout == b"heard 300000 bytes\n"
    assert (await sh(box, "echo > /dev/tcp/127.0.0.1/80")).exit_code != 0
    await sh(box, "kill -9 -1; rm -rf /run/* /run/openforge/*")
    assert (await half_closed(box)).stdout == b"heard 300000 bytes\n"
    upstream.stop()
    assert (await half_closed(box)).stdout == b""
    await upstream.start()
    assert (await half_closed(box)).stdout == b"heard 300000 bytes\n"


@NEEDS_PYTHON
async def test_an_agent_cannot_take_the_place_of_the_proxy(way_out: tuple[Sandbox, Upstream]) -> None:
    box, _ = way_out
    script = "import socket; s = socket.socket(); s.bind(('127.0.0.1', 8080)); s.listen()"
    assert (await box.exec(["/usr/bin/python3", "-c", script], timeout_s=20)).exit_code != 0

"""The embedded server starts, stops and tells why it cannot."""

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from openforge.bus.server import NatsServer, ServerConfig, ServerFailed, find_binary, free_port


def alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


async def test_stop_and_kill_leave_no_process(tmp_path: Path) -> None:
    for end in ("stop", "kill"):
        server = NatsServer(ServerConfig(folder=str(tmp_path / end), port=free_port()))
        await server.start()
        pid = server.pid
        assert pid is not None
        assert alive(pid)
        await getattr(server, end)()
        await getattr(server, end)()
        assert not alive(pid)


async def test_a_port_that_is_taken_is_said_with_the_servers_own_words(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = NatsServer(ServerConfig(folder=str(tmp_path), port=taken.getsockname()[1]))
        with pytest.raises(ServerFailed, match="address already in use"):
            await server.start(timeout_s=5.0)


async def test_only_its_user_can_read_its_configuration(tmp_path: Path) -> None:
    server = NatsServer(ServerConfig(folder=str(tmp_path), port=free_port(), users={"a": 'quo"te'}))
    await server.start()
    await server.stop()
    assert (tmp_path / "nats.conf").stat().st_mode & 0o077 == 0


def test_it_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    script = f"""
import asyncio, os, signal
from openforge.bus.server import NatsServer, ServerConfig
async def main():
    server = NatsServer(ServerConfig(folder={str(tmp_path)!r}, port={free_port()}))
    await server.start()
    print(server.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ended = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=30)
    pid = int(ended.stdout)
    for _ in range(100):
        if not alive(pid):
            break
        asyncio.run(asyncio.sleep(0.05))
    assert not alive(pid)


def test_the_binary_of_the_wheel_is_found() -> None:
    assert Path(find_binary()).name == "nats-server"

"""A service process from its start to its exit code."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from openforge.bus.server import NatsServer, free_port
from openforge.service import BAD_SETTINGS, FAILED, OK, ZOMBIE, HealthState, read_health

SERVICE = """
import asyncio, msgspec, os
from openforge.service import Zombie, health, log, run_service

class Settings(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    mood: str = "calm"

async def serve(settings, bus, stop):
    log.info("serving", run=settings.run)
    if settings.mood == "waiting":
        health.not_ready(said_before=os.path.exists(os.environ["OPENFORGE_HEALTH_FILE"]))
    health.report(mood=settings.mood)
    if settings.mood == "zombie":
        async with asyncio.TaskGroup() as group:
            group.create_task(rise())
    if settings.mood == "broken":
        raise ValueError("a bug")
    await (asyncio.Event().wait() if settings.mood == "deaf" else stop.wait())

async def rise():
    raise Zombie("somebody else is at work")

run_service("sample", Settings, serve)
"""


class Running:
    def __init__(self, process: asyncio.subprocess.Process, health_file: Path) -> None:
        self.process = process
        self._health_file = health_file

    async def health(self, ready: Callable[[HealthState], bool]) -> HealthState:
        async with asyncio.timeout(20):
            while True:
                state = read_health(self._health_file)
                if state is not None and ready(state):
                    return state
                await asyncio.sleep(0.05)

    async def end(self) -> tuple[int, list[dict[str, object]]]:
        async with asyncio.timeout(20):
            _, errors = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, [json.loads(line) for line in errors.decode().splitlines()]


@pytest.fixture
async def start(tmp_path: Path, nats_server: NatsServer) -> AsyncIterator[Callable[..., object]]:
    started: list[asyncio.subprocess.Process] = []

    async def begin(**env: str) -> Running:
        health_file = tmp_path / "health.json"
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            SERVICE,
            env={
                "PATH": os.environ["PATH"],
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                "OPENFORGE_RUN": "r",
                "OPENFORGE_NATS_URL": nats_server.url,
                "OPENFORGE_HEALTH_FILE": str(health_file),
                **env,
            },
            stderr=asyncio.subprocess.PIPE,
        )
        started.append(process)
        return Running(process, health_file)

    yield begin
    for process in started:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_service_is_ready_until_it_is_asked_to_stop_and_ends_cleanly(start) -> None:
    running = await start()
    state = await running.health(lambda state: state.ready and "mood" in state.detail)
    assert (state.service, state.pid, state.detail["mood"]) == ("sample", running.process.pid, "calm")
    running.process.send_signal(signal.SIGTERM)
    code, lines = await running.end()
    assert code == OK
    assert [line["event"] for line in lines] == ["started", "serving", "stopping", "stopped"]
    assert {line["service"] for line in lines} == {"sample"}
    assert not (await running.health(lambda state: True)).ready


async def test_a_service_that_waits_for_something_is_at_no_moment_said_to_be_ready(start) -> None:
    running = await start(OPENFORGE_MOOD="waiting")
    first = await running.health(lambda state: "mood" in state.detail)
    assert (first.ready, first.detail["said_before"]) == (False, False)
    later = await running.health(lambda state: state.at > first.at + 1)
    assert not later.ready
    running.process.send_signal(signal.SIGTERM)
    assert (await running.end())[0] == OK


async def test_the_second_signal_ends_a_service_that_does_not_listen(start) -> None:
    running = await start(OPENFORGE_MOOD="deaf")
    await running.health(lambda state: "mood" in state.detail)
    running.process.send_signal(signal.SIGINT)
    await asyncio.sleep(0.3)
    assert running.process.returncode is None
    running.process.send_signal(signal.SIGINT)
    code, lines = await running.end()
    assert code == 128 + signal.SIGINT
    assert lines[-1]["event"] == "ended at once"


async def test_a_zombie_exits_with_its_own_code_even_from_within_a_group(start) -> None:
    code, lines = await (await start(OPENFORGE_MOOD="zombie")).end()
    assert code == ZOMBIE
    assert (lines[-1]["event"], lines[-1]["why"]) == ("zombie", "somebody else is at work")


async def test_a_bug_is_a_crash_with_its_traceback(start) -> None:
    code, lines = await (await start(OPENFORGE_MOOD="broken")).end()
    assert code == FAILED
    assert "ValueError: a bug" in str(lines[-1]["traceback"])


async def test_bad_settings_are_one_clear_line(start) -> None:
    code, lines = await (await start(OPENFORGE_STREAM_MAX_BYTES="lots")).end()
    assert code == BAD_SETTINGS
    [line] = lines
    assert "OPENFORGE_STREAM_MAX_BYTES = 'lots'" in str(line["why"])


async def test_no_server_is_one_clear_line(start) -> None:
    url = f"nats://127.0.0.1:{free_port()}"
    code, lines = await (await start(OPENFORGE_NATS_URL=url, OPENFORGE_NATS_CONNECT_TIMEOUT_S="0.5")).end()
    assert code == FAILED
    [line] = lines
    assert url in str(line["why"])
    assert "traceback" not in line


async def test_a_service_that_waits_for_its_bus_stops_when_asked(start) -> None:
    running = await start(OPENFORGE_NATS_URL=f"nats://127.0.0.1:{free_port()}", OPENFORGE_LOG_LEVEL="debug")
    assert running.process.stderr is not None
    while b"bus error" not in await running.process.stderr.readline():
        pass
    running.process.send_signal(signal.SIGTERM)
    code, lines = await running.end()
    assert code == OK
    assert lines[-1]["event"] == "stopped"


async def test_the_health_file_is_written_again_and_again(start) -> None:
    running = await start()
    first = await running.health(lambda state: state.ready)
    later = await running.health(lambda state: state.at > first.at + 1.0)
    assert later.ready


async def test_a_service_ends_with_its_parent(tmp_path: Path, nats_server: NatsServer) -> None:
    parent = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {SERVICE!r}])
print(child.pid, flush=True)
time.sleep(60)
"""
    health_file = tmp_path / "health.json"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        parent,
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "OPENFORGE_RUN": "r",
            "OPENFORGE_NATS_URL": nats_server.url,
            "OPENFORGE_HEALTH_FILE": str(health_file),
            "OPENFORGE_DIE_WITH_PARENT": "1",
        },
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdout is not None
    child = int(await process.stdout.readline())
    await Running(process, health_file).health(lambda state: state.ready)
    process.kill()
    await process.communicate()
    async with asyncio.timeout(10):
        while _runs(child):
            await asyncio.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False

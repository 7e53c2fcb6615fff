import asyncio
import errno
import os
import sys
from pathlib import Path

import pytest

from openforge.cli.supervise import GaveUp, Policy, Spec, Supervised, Supervisor

QUICK = Policy(quick_deaths=3, quick_s=30, first_pause_s=0.01, longest_pause_s=0.05, grace_s=1.0)


def python(tmp_path: Path, name: str, code: str) -> Spec:
    return Spec(name=name, argv=(sys.executable, "-c", code), env=dict(os.environ), log=tmp_path / f"{name}.log")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


async def read_when_there(path: Path) -> str:
    async with asyncio.timeout(10):
        while not path.exists() or not path.read_text():
            await asyncio.sleep(0.02)
    return path.read_text()


async def test_a_process_that_is_killed_is_started_again(tmp_path: Path) -> None:
    supervisor = Supervisor([python(tmp_path, "sleeper", "import time; time.sleep(60)")], policy=QUICK)
    running = asyncio.create_task(supervisor.run())
    await supervisor.ready()
    sleeper = supervisor["sleeper"]
    assert sleeper.process is not None
    first = sleeper.process.pid
    os.kill(first, 9)
    async with asyncio.timeout(10):
        while sleeper.starts < 2 or sleeper.process.pid == first:
            await asyncio.sleep(0.02)
    await supervisor.stop()
    await running
    assert not alive(first)
    assert not alive(sleeper.process.pid)


async def test_one_that_keeps_dying_ends_the_whole_with_its_last_words(tmp_path: Path) -> None:
    steady = python(tmp_path, "steady", "import time; time.sleep(60)")
    broken = python(tmp_path, "broken", "import sys; sys.exit('no such model: nowhere')")
    supervisor = Supervisor([steady, broken], policy=QUICK)
    with pytest.raises(GaveUp, match=r"broken ended .* 3 times in a row .*: no such model: nowhere \(log .*\)$"):
        await supervisor.run()
    steady_process = supervisor["steady"].process
    assert steady_process is not None
    assert not alive(steady_process.pid)


async def test_a_place_that_cannot_be_written_any_more_ends_the_whole_and_says_so(tmp_path: Path) -> None:
    def told(process: Supervised) -> None:
        if process.starts > 1:
            raise OSError(errno.ENOSPC, "No space left on device")

    steady = python(tmp_path, "steady", "import time; time.sleep(60)")
    supervisor = Supervisor([steady, python(tmp_path, "dying", "")], policy=QUICK, on_change=told)
    with pytest.raises(GaveUp, match="No space left on device"):
        await supervisor.run()
    steady_process = supervisor["steady"].process
    assert steady_process is not None
    assert not alive(steady_process.pid)


async def test_stop_ends_children_that_ignore_it_too(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    stubborn = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); child = os.fork();"
        f"open({str(pid_file)!r}, 'w').write(str(child)) if child else None; time.sleep(60)"
    )
    supervisor = Supervisor([python(tmp_path, "stubborn", stubborn)], policy=QUICK)
    running = asyncio.create_task(supervisor.run())
    child = int(await read_when_there(pid_file))
    await supervisor.stop()
    await running
    async with asyncio.timeout(10):  # init reaps it in its own time
        while alive(child):
            await asyncio.sleep(0.05)


async def test_a_stop_while_a_process_is_being_started_ends_it_too(tmp_path: Path) -> None:
    supervisor = Supervisor([python(tmp_path, "sleeper", "import time; time.sleep(60)")], policy=QUICK)
    running = asyncio.create_task(supervisor.run())
    sleeper = supervisor["sleeper"]
    while not sleeper.starts:
        await asyncio.sleep(0)
    assert sleeper.process is None
    await supervisor.stop()
    async with asyncio.timeout(30):
        await running
    assert sleeper.process is not None
    assert not alive(sleeper.process.pid)

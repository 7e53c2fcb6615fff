"""A reader sees what it asked for, in order, each fact once, whatever restarts."""

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from fact_examples import FACTS, RUN

from openforge.bus import Bus, BusSettings
from openforge.bus.server import NatsServer, ServerConfig, free_port
from openforge.client import BlockingClient, Client, NameTaken, Reading
from openforge.protos import (
    BatchTrained,
    Fact,
    PolicyPublished,
    RunStopped,
    TrajectoryVerified,
    TurnRecorded,
    unpack_ids,
    unpack_logprobs,
)

TRAJECTORY = next(fact for fact in FACTS if isinstance(fact, TrajectoryVerified))
POLICY = [fact for fact in FACTS if fact.kind == "policy"]


def trajectory(n: int, *, run: str = RUN, env: str = "shell", harness: str = "mini") -> TrajectoryVerified:
    task = msgspec.structs.replace(TRAJECTORY.task, env=env)
    return msgspec.structs.replace(TRAJECTORY, run=run, task=task, harness=harness, episode=f"g{n:06d}-0")


async def all_of(reading: Reading[Fact]) -> list[Fact]:
    return [told.fact async for told in reading]


async def some_of(reading: Reading[Fact], count: int) -> list[Fact]:
    """`count` facts, each of them done."""
    facts = [(await anext(reading)).fact for _ in range(count)]
    await reading.done()
    return facts


async def test_every_kind_is_read_as_it_was_told(bus: Bus, bus_settings: BusSettings) -> None:
    await bus.tell_all(FACTS)
    async with Client.connect(settings=bus_settings) as client:
        assert await all_of(client.trajectories(until_now=True)) == [TRAJECTORY]
        assert [type(fact) for fact in await all_of(client.turns(until_now=True))] == [TurnRecorded]
        assert [type(fact) for fact in await all_of(client.batches(until_now=True))] == [BatchTrained]
        assert await all_of(client.policy(until_now=True)) == POLICY
        assert [fact.version for fact in await all_of(client.facts(PolicyPublished, 4, until_now=True))] == [4]
        assert await all_of(client.facts(RunStopped, 7, until_now=True)) == []
    sequence = TRAJECTORY.sequences[0]
    assert unpack_ids(sequence.ids) == [5, 6, 7, 8, 9]
    assert unpack_logprobs(sequence.logprobs) == [-0.5, -0.25]


async def test_the_server_gives_only_what_was_asked_for(bus: Bus, bus_settings: BusSettings) -> None:
    facts = [
        trajectory(n, run=run, env=env, harness=harness)
        for n, (run, env, harness) in enumerate(
            itertools.product(("a", "b"), ("shell", "/x/my env/env.py"), ("h", "i"))
        )
    ]
    await bus.tell_all(facts)
    async with Client.connect(settings=bus_settings) as client:
        assert await all_of(client.trajectories(run="b", until_now=True)) == facts[4:]
        assert await all_of(client.trajectories(env="shell", until_now=True)) == [*facts[0:2], *facts[4:6]]
        assert await all_of(client.trajectories(env="/x/my env/env.py", harness="i", until_now=True)) == facts[3::4]
        assert client.trajectories(run="b", env="/x/my env/env.py").subjects == "of.b.trajectory.my_env.*.>"


async def test_facts_are_replayed_from_a_time_or_a_sequence(bus: Bus, bus_settings: BusSettings) -> None:
    facts = [trajectory(n) for n in range(6)]
    await bus.tell_all(facts[:3])
    await asyncio.sleep(0.05)
    between = time.time()
    await asyncio.sleep(0.05)
    await bus.tell_all(facts[3:])
    async with Client.connect(settings=bus_settings) as client:
        for since in (between, datetime.fromtimestamp(between, UTC), datetime.fromtimestamp(between)):
            assert await all_of(client.trajectories(since=since, until_now=True)) == facts[3:]
        assert await all_of(client.trajectories(since=timedelta(hours=1), until_now=True)) == facts
        assert await all_of(client.trajectories(since=timedelta(hours=-1), until_now=True)) == []
        assert await all_of(client.trajectories(after=4, until_now=True)) == facts[4:]
        with pytest.raises(ValueError, match="say one of the two"):
            client.trajectories(after=4, since=between)


async def test_a_name_goes_on_where_it_was_and_a_broken_off_fact_comes_again(
    bus: Bus, bus_settings: BusSettings
) -> None:
    facts = [trajectory(n) for n in range(9)]
    await bus.tell_all(facts)
    async with Client.connect(settings=bus_settings) as client:
        assert await some_of(client.trajectories(name="mine", after=2), 3) == facts[2:5]
    async with Client.connect(settings=bus_settings) as client:
        async for told in client.trajectories(name="mine"):
            assert told.fact == facts[5]
            break  # not done
    async with Client.connect(settings=bus_settings) as client:
        assert await all_of(client.trajectories(name="mine", until_now=True)) == facts[5:]
        assert await all_of(client.trajectories(name="other", until_now=True)) == facts
    async with Client.connect(settings=bus_settings) as client:
        assert await all_of(client.trajectories(name="mine", until_now=True)) == []
        await client.forget("mine")
        assert await all_of(client.trajectories(name="mine", until_now=True)) == facts


async def test_a_name_reads_one_thing_and_has_one_reader(bus: Bus, bus_settings: BusSettings) -> None:
    await bus.tell_all([trajectory(n) for n in range(4)])
    async with Client.connect(settings=bus_settings) as older, Client.connect(settings=bus_settings) as newer:
        first = older.trajectories(name="mine")
        await some_of(first, 1)
        await some_of(newer.trajectories(name="mine"), 1)
        await anext(first)
        with pytest.raises(NameTaken, match="somebody else"):
            await first.done()
        with pytest.raises(NameTaken, match="choose another name"):
            await anext(newer.turns(name="mine"))


async def test_reading_goes_on_over_a_restart_of_the_server(
    bus: Bus, bus_settings: BusSettings, nats_server: NatsServer
) -> None:
    facts = [trajectory(n) for n in range(700)]
    await bus.tell_all(facts[:600])
    async with Client.connect(settings=bus_settings) as client:
        reading = client.trajectories(name="mine")
        read = await some_of(reading, 300)
        await nats_server.restart()
        read += await some_of(reading, 300)
        waiting = asyncio.create_task(some_of(reading, 100))
        await nats_server.restart()
        await bus.tell_all(facts[600:])
        read += await waiting
    assert read == facts


async def test_what_is_no_fact_of_ours_is_passed_over(bus: Bus, bus_settings: BusSettings) -> None:
    await bus.link.publish("of.demo.trajectory.shell.mini.broken", b"\xc1")
    await bus.link.publish("of.demo.trajectory.shell.mini.newer", msgspec.msgpack.encode({"fact": "Invented"}))
    await bus.tell(trajectory(1))
    async with Client.connect(settings=bus_settings) as client:
        reading = client.trajectories(until_now=True)
        assert await all_of(reading) == [trajectory(1)]
        assert reading.passed_over == 2
    assert await bus.dead_letters() == []


_CONSUMER = """
import asyncio, sys
from openforge.client import Client
async def main():
    async with Client.connect(sys.argv[1]) as client:
        with open(sys.argv[2], "a", buffering=1) as seen:
            async for told in client.trajectories(name="mine", until_now=len(sys.argv) > 3):
                seen.write(f"{told.subject}\\n")
                await asyncio.sleep(0.002)
asyncio.run(main())
"""


async def test_a_consumer_that_is_killed_in_mid_stream_misses_nothing_and_knows_what_comes_again(
    bus: Bus, bus_settings: BusSettings, tmp_path: Path
) -> None:
    facts = [trajectory(n) for n in range(2000)]
    await bus.tell_all(facts)
    seen = tmp_path / "seen"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    argv = (sys.executable, "-c", _CONSUMER, bus_settings.url, str(seen))
    consumer = await asyncio.create_subprocess_exec(*argv, env=env)
    while len(_lines(seen)) < 1000:  # at 2 ms each: the cursor has been stored once at least
        await asyncio.sleep(0.05)
    consumer.send_signal(signal.SIGKILL)
    await consumer.wait()
    before = len(_lines(seen))
    assert before < len(facts)
    again = await asyncio.create_subprocess_exec(*argv, "until now", env=env)
    assert await again.wait() == 0
    subjects = [fact.subject() for fact in facts]
    assert list(dict.fromkeys(_lines(seen))) == subjects  # the subject is the key: with it, each once, in order
    assert _lines(seen)[before:] == subjects[-(len(_lines(seen)) - before) :]
    assert len(_lines(seen)) - before < len(facts)  # what came again was the last second's, not everything


def _lines(file: Path) -> list[str]:
    return file.read_text().split() if file.exists() else []


def test_a_program_without_an_event_loop_reads_the_same(nats_url_with_facts: str) -> None:
    with BlockingClient.connect(nats_url_with_facts) as client:
        read = [told.fact for told in client.trajectories(run=RUN, name="mine", until_now=True)]
        assert read == [TRAJECTORY]
        assert list(client.trajectories(run=RUN, name="mine", until_now=True)) == []
        client.forget("mine")
        reading = client.trajectories(name="mine")
        assert next(reading).fact == TRAJECTORY
        reading.done()
        assert [told.fact.version for told in client.batches(until_now=True)] == [4]
        assert [told.fact for told in client.policy(until_now=True)] == POLICY
        assert len(list(client.turns(until_now=True))) == 1
        assert list(client.facts(RunStopped, 9, until_now=True)) == []


@pytest.fixture
def nats_url_with_facts(tmp_path: Path) -> Iterator[str]:
    server = NatsServer(ServerConfig(folder=str(tmp_path / "nats"), port=free_port()), die_with_parent=False)

    async def begin() -> None:
        await server.start()
        async with Bus.connect(BusSettings(url=server.url), name="test") as bus:
            await bus.set_up()
            await bus.tell_all(FACTS)

    with asyncio.Runner() as runner:
        runner.run(begin())
        yield server.url
        runner.run(server.kill())


def test_importing_the_client_loads_nothing_heavy() -> None:
    heavy = "torch transformers numpy fastapi starlette uvicorn httpx typer rich pyarrow tokenizers"
    code = f"import sys, openforge.client; print([name for name in {heavy.split()!r} if name in sys.modules])"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ran = subprocess.run((sys.executable, "-c", code), env=env, capture_output=True, text=True, check=True, timeout=120)
    assert ran.stdout.strip() == "[]"

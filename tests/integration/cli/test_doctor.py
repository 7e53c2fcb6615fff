"""Deployments broken on purpose, each on real servers: the doctor names the fault and what to do."""

import asyncio
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from credentials_world import World, world_at
from fact_examples import DEAD_LETTER, FACTS, RUN
from manifests import rendered
from pods import cluster
from s3_server import BUCKET, S3Server

from openforge.bus import Bus, BusSettings
from openforge.bus.permissions import OPERATOR
from openforge.bus.server import NatsServer, ServerConfig, find_binary, free_port
from openforge.bus.settings import StreamLimits
from openforge.cli.doctor import Deployment, Finding, examine
from openforge.protos import RunSubmitted
from openforge.runs import RunConfig, canonical
from openforge.runs.config import EnvironmentSection, ModelSection, RunSection, WeightsSection
from openforge.service import HealthState


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with world_at(tmp_path) as world:
        async with world.bus(OPERATOR) as bus:
            await bus.set_up()
        yield world


def deployment(world: World, **changed: object) -> Deployment:
    well = Deployment(bus=world.settings(OPERATOR), keys=world.credentials.folder, sandbox=False)
    return msgspec.structs.replace(well, **changed)


async def faults(what: Deployment) -> dict[str, Finding]:
    return {finding.check: finding async for finding in examine(what) if finding.state == "fault"}


async def the_fault(what: Deployment, check: str, said: str, remedy: str) -> None:
    """Exactly this one is found."""
    found = await faults(what)
    assert list(found) == [check], found
    assert said in found[check].said
    assert remedy in found[check].remedy


@asynccontextmanager
async def answering(answer: Callable[[str], tuple[int, bytes]]) -> AsyncIterator[str]:
    """A peer over the wire that answers each GET by its path."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        status, body = answer(head.split()[1].decode())
        writer.write(b"HTTP/1.1 %d x\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % (status, len(body)) + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def engine_at(version: str) -> Callable[[str], tuple[int, bytes]]:
    weights = msgspec.json.encode({"weight_version": version})
    return lambda path: (200, weights if path == "/weight_info" else b"")


async def test_a_deployment_that_is_well_has_no_fault_and_nothing_is_said_beside_the_findings(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_text("{}")
    async with answering(engine_at("4")) as engine, answering(lambda _: (401, b"{}")) as proxy:
        what = deployment(
            world, engine_url=engine, proxy_url=proxy, model=str(tmp_path), folders=(tmp_path,), free_mb=1, sandbox=True
        )
        findings = [finding async for finding in examine(what)]
    assert [finding for finding in findings if finding.state == "fault"] == []
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert {"bus", "streams", "clock", "blobs", "credentials", "engine", "proxy", "model", "sandbox"} <= {
        finding.check for finding in findings if finding.state in ("ok", "note")
    }


async def test_no_server(tmp_path: Path) -> None:
    settings = BusSettings(url=f"nats://127.0.0.1:{free_port()}", connect_timeout_s=0.5)
    await the_fault(Deployment(bus=settings, sandbox=False), "bus", "no NATS server answered", "OPENFORGE_NATS_URL")


def stands_still(pid: int) -> bool:
    """Each of its threads: they stop one by one."""
    return all(" T " in place.read_text() for place in Path(f"/proc/{pid}/task").glob("*/stat"))


async def test_a_server_that_takes_connections_and_says_nothing(world: World) -> None:
    settings = msgspec.structs.replace(world.settings(OPERATOR), connect_timeout_s=1.0)
    os.kill(world.server.pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(60):
            while not stands_still(world.server.pid):
                await asyncio.sleep(0.01)
            found = await faults(deployment(world, bus=settings, run=RUN))
    finally:
        os.kill(world.server.pid, signal.SIGCONT)
    assert list(found) == ["bus", "credentials of operator"]
    assert "no NATS server answered" in found["bus"].said
    assert "not a word came" in found["bus"].said
    assert "a nats-server that hangs is started again" in found["bus"].remedy


async def test_a_server_without_jetstream() -> None:
    port = free_port()
    server = await asyncio.create_subprocess_exec(
        find_binary(), "-a", "127.0.0.1", "-p", str(port), stderr=asyncio.subprocess.PIPE
    )
    try:
        assert server.stderr is not None
        while b"Server is ready" not in (line := await server.stderr.readline()):
            assert line, "nats-server ended at once"
        settings = BusSettings(url=f"nats://127.0.0.1:{port}", connect_timeout_s=5.0)
        what = Deployment(bus=settings, sandbox=False)
        await the_fault(what, "bus", "is JetStream enabled", "`jetstream` block")
    finally:
        server.kill()
        await server.wait()


async def test_a_server_that_does_not_let_us_in(world: World) -> None:
    stranger = BusSettings(url=world.server.url, connect_timeout_s=3.0)
    await the_fault(Deployment(bus=stranger, sandbox=False), "bus", "did not let us in", "operator's seed")


async def test_a_missing_stream(world: World) -> None:
    async with world.bus(OPERATOR) as bus:
        await bus.link.ask_api("STREAM.DELETE.TURN")
    await the_fault(deployment(world), "streams", "missing: TURN", "openforge bus set-up")


async def test_a_stream_that_is_nearly_full(world: World) -> None:
    async with world.bus(OPERATOR) as bus:
        await bus.tell(FACTS[0])
        info = await bus.link.ask_api("STREAM.INFO.RUN")
        await bus.link.ask_api("STREAM.UPDATE.RUN", info["config"] | {"max_bytes": info["state"]["bytes"] + 1})
    await the_fault(deployment(world), "streams", "RUN holds", "OPENFORGE_STREAM_MAX_BYTES")


async def test_streams_with_too_few_copies_and_a_node_of_the_cluster_that_is_gone(tmp_path: Path) -> None:
    async with cluster(tmp_path, rendered("local-cpu"), RUN, only=("nats",)) as pods:
        settings = pods.operator()
        alone = msgspec.structs.replace(settings, streams=StreamLimits(replicas=1))
        async with Bus.connect(alone, name="test") as bus:
            await bus.set_up()
        found = await faults(Deployment(bus=settings, sandbox=False))
        assert "has 1 replicas, OPENFORGE_STREAM_REPLICAS wants 3" in found["streams"].said
        assert "openforge bus set-up" in found["streams"].remedy
        await pods.complete("bus-set-up", within_s=120)
        async with asyncio.timeout(240):
            while "streams" in await faults(Deployment(bus=settings, sandbox=False)):
                await asyncio.sleep(0.5)  # until every copy is made
            await pods.process("nats-1").stop()
            while "streams" not in (found := await faults(Deployment(bus=settings, sandbox=False))):
                await asyncio.sleep(0.5)  # until the others miss it
        assert "nats-1 is not up to date" in found["streams"].said
        assert "start that NATS node again" in found["streams"].remedy
        await pods.process("nats-2").stop()
        silent = Deployment(bus=settings, run=RUN, sandbox=False)
        async with asyncio.timeout(240):
            while (
                list(found := await faults(silent)) != ["streams"]
                or "its streams do not work" not in found["streams"].said
            ):
                await asyncio.sleep(0.5)  # until the last one knows that it leads nothing any more
    assert "unless more than half of them are up" in found["streams"].remedy


async def test_sandboxes_that_cannot_be_made(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENFORGE_SANDBOX_DRIVER", "docker")
    monkeypatch.setenv("OPENFORGE_SANDBOX_SOCKET", str(tmp_path / "nobody.sock"))
    await the_fault(deployment(world, sandbox=True), "sandbox", "nobody.sock", "OPENFORGE_SANDBOX_SOCKET")


async def test_sandboxes_are_tried_on_the_runtime_that_the_run_asks_for(world: World) -> None:
    config = RunConfig(
        run=RunSection(name=RUN, steps=1),
        model=ModelSection(path="/m"),
        environment=EnvironmentSection(name="letters", harness="letters", runtime="runsc"),
    )
    text, digest = canonical(config)
    async with world.bus(OPERATOR) as bus:
        await bus.tell(RunSubmitted(run=RUN, generation=0, config=text, config_digest=digest))
    found = await faults(deployment(world, run=RUN, sandbox=True))
    assert (
        "environment.runtime = 'runsc': sandboxes of driver process share this host's kernel" in found["sandbox"].said
    )


async def test_a_bucket_for_weights_is_tried(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    s3 = S3Server(tmp_path / "s3")
    s3.start()
    try:
        for who, state, said in (
            ("learner", "ok", "takes and lists objects"),
            ("engine", "fault", "these credentials may not write there"),
        ):
            config = RunConfig(
                run=RunSection(name=who, steps=1),
                model=ModelSection(path="/m"),
                environment=EnvironmentSection(name="letters", harness="letters"),
                weights=WeightsSection(store=f"s3://{BUCKET}/doctor"),
            )
            text, digest = canonical(config)
            async with world.bus(OPERATOR) as bus:
                await bus.tell(RunSubmitted(run=who, generation=0, config=text, config_digest=digest))
            for name, value in s3.env(who).items():
                monkeypatch.setenv(name, value)
            findings = [finding async for finding in examine(deployment(world, run=who)) if finding.check == "weights"]
            assert [(finding.state, said in finding.said) for finding in findings] == [(state, True)], findings
            assert (state == "ok") != ("AWS_ACCESS_KEY_ID" in findings[0].remedy)
    finally:
        s3.stop()


async def test_a_clock_that_is_wrong(world: World) -> None:
    ahead = deployment(world, clock=lambda: time.time() + 60)
    await the_fault(ahead, "clock", "s ahead of the server", "NTP")


async def test_blobs_where_nobody_can_write(world: World, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    bus = msgspec.structs.replace(world.settings(OPERATOR), blobs=str(tmp_path / "file"))
    await the_fault(deployment(world, bus=bus), "blobs", str(tmp_path / "file"), "OPENFORGE_BLOBS")


async def test_dead_letters(world: World) -> None:
    async with world.bus(OPERATOR) as bus:
        await bus.link.publish(DEAD_LETTER.subject_of_death(), msgspec.msgpack.encode(DEAD_LETTER))
    await the_fault(deployment(world), "dead letters", "1, the last by verifier: handler failed", "stream DEAD")


async def test_a_seed_that_is_missing_one_that_all_can_read_and_one_that_the_server_does_not_know(world: World) -> None:
    world.credentials.seed("engine").unlink()
    world.credentials.seed("proxy").chmod(0o644)
    learner = world.credentials.seed("learner")
    learner.unlink()
    world.credentials.make()  # the server has not read its users again: it knows neither new seed
    world.credentials.seed("engine").unlink()
    found = await faults(deployment(world))
    assert list(found) == ["credentials of proxy", "credentials of engine", "credentials of learner"]
    assert "chmod 600" in found["credentials of proxy"].remedy
    assert "openforge bus credentials" in found["credentials of engine"].remedy
    assert "does not know learner.nk" in found["credentials of learner"].said
    assert "SIGHUP" in found["credentials of learner"].remedy


async def test_a_server_without_permissions(world: World, tmp_path: Path) -> None:
    config = ServerConfig(folder=str(tmp_path / "open"), port=free_port())
    server = NatsServer(config)
    await server.start()
    try:
        bus = msgspec.structs.replace(world.settings(OPERATOR), url=server.url)
        found = await faults(deployment(world, bus=bus))
    finally:
        await server.kill()
    assert "not its business" in found["credentials of engine"].said
    assert "users.conf" in found["credentials of engine"].remedy
    assert "credentials of proxy" not in found  # it reads keys


async def test_a_run_that_nobody_submitted(world: World) -> None:
    await the_fault(deployment(world, run="nobody"), "run", "'nobody' was never submitted", "check name")


async def test_a_run_with_something_that_is_no_fact(world: World) -> None:
    async with world.bus(OPERATOR) as bus:
        await bus.link.publish(RunSubmitted.subject_for("r", 0), b"no fact", {})
    await the_fault(deployment(world, run="r"), "run", "a fact of it cannot be read", "look who wrote it")


async def test_an_engine_that_is_not_there_serves_nothing_is_a_stranger_or_is_behind(world: World) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    await the_fault(deployment(world, engine_url=nobody), "engine", "nobody answers", "start the engine")
    async with answering(lambda _: (503, b"{}")) as url:
        await the_fault(deployment(world, engine_url=url), "engine", "serves no weights yet", "engine's log")
    async with answering(lambda _: (200, b"hello")) as url:
        await the_fault(deployment(world, engine_url=url), "engine", "no engine of ours", "OPENFORGE_ENGINE_URL")
    async with world.bus(OPERATOR) as bus:
        await bus.tell_all(fact for fact in FACTS if type(fact).__name__ == "PolicyPublished")
    async with answering(engine_at("3")) as url:
        found = await faults(deployment(world, engine_url=url, run=RUN))
    assert "serves version 3, and 4 is published" in found["engine"].said
    assert "weights' folder" in found["engine"].remedy


async def test_a_proxy_that_is_not_there_or_lets_everybody_in(world: World) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    await the_fault(deployment(world, proxy_url=nobody), "proxy", "nobody answers", "start the proxy")
    async with answering(lambda _: (200, b"[]")) as url:
        await the_fault(deployment(world, proxy_url=url), "proxy", "no proxy of ours", "OPENFORGE_PROXY_URL")


async def test_a_model_that_is_not_here(world: World, tmp_path: Path) -> None:
    await the_fault(
        deployment(world, model=str(tmp_path / "m")), "model", "no checkpoint folder", "openforge model get"
    )


async def test_a_service_that_hangs_and_one_that_waits(world: World, tmp_path: Path) -> None:
    for service, at, ready in (("learner", time.time() - 300, True), ("proxy", time.time(), False)):
        state = HealthState(service=service, pid=1, ready=ready, at=at, detail={"waiting_for": "the run"})
        (tmp_path / f"{service}.json").write_bytes(msgspec.json.encode(state))
    found = await faults(deployment(world, health=tmp_path))
    assert "silent for 30" in found["health of learner"].said
    assert "end pid 1" in found["health of learner"].remedy
    assert "waits for the run" in found["health of proxy"].said


async def test_a_disk_that_is_full(world: World, tmp_path: Path) -> None:
    full = deployment(world, folders=(tmp_path,), free_mb=1 << 40)
    await the_fault(full, f"disk of {tmp_path}", "MB are free", "keep_checkpoints")

"""`openforge train --remote`, with a real server that lets in nobody but those of the permission table."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from click.testing import Result
from credentials_world import World, world_at
from pretend_run import PretendRun
from typer.testing import CliRunner

from openforge.bus.permissions import CONSUMER, OPERATOR
from openforge.bus.server import free_port
from openforge.cli.main import app
from openforge.cli.remote import UNTOUCHED_S, remark_on
from openforge.protos import RunStopped, RunSubmitted, StopReason
from openforge.runs import Progress, load_run_file

RUN = """
[run]
name = "r"
steps = 2

[model]
path = "builtin:tiny"

[environment]
name = "shell"
harness = "mini"

[pacing]
groups_per_step = 2
group_size = 2
in_flight = 8
max_lag = 1

[evaluation]
heldout_episodes = 3
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    file = tmp_path / "run.toml"
    file.write_text(RUN)
    return file


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """A deployment's bus, set up by its operator."""
    async with world_at(tmp_path, consumers=["reader"]) as world:
        async with world.bus(OPERATOR) as bus:
            await bus.set_up()
        yield world


@pytest.fixture
def as_operator(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("OPENFORGE_NATS_NKEY_SEED_FILE", str(world.credentials.seed(OPERATOR)))
    return world


def checked(run_file: Path, url: str, *more: str) -> Result:
    """The command where it ends before it connects."""
    return CliRunner().invoke(app, ["train", str(run_file), "--remote", url, *more])


async def trainer(run_file: Path, url: str, *more: str) -> asyncio.subprocess.Process:
    """The command as a process of its own, since it listens for signals."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "openforge.cli", "train", str(run_file), "--remote", url, *more),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )


async def refused(run_file: Path, url: str) -> str:
    """What it says when it ends with exit code 1."""
    command = await trainer(run_file, url)
    said, _ = await command.communicate()
    assert command.returncode == 1, said
    return said.decode()


async def until_submitted(world: World) -> None:
    async with asyncio.timeout(60), world.bus(OPERATOR) as bus:
        while not await bus.count(RunSubmitted, "r"):
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("url", ["nats.example", "http://127.0.0.1:4222", "nats://"])
def test_what_is_no_bus_is_refused_before_anything_is_connected(run_file: Path, url: str) -> None:
    result = checked(run_file, url)
    assert result.exit_code == 2
    assert f"--remote {url!r} is no bus: use nats://HOST:PORT" in result.output


async def test_an_absent_server_is_named_with_the_way_out(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENFORGE_NATS_CONNECT_TIMEOUT_S", "0.5")
    url = f"nats://127.0.0.1:{free_port()}"
    said = await refused(run_file, url)
    assert f"no NATS server answered at {url}" in said


async def test_whoever_shows_no_seed_is_not_let_in_and_told_what_to_set(world: World, run_file: Path) -> None:
    said = await refused(run_file, world.server.url)
    assert "did not let us in" in said
    assert "set OPENFORGE_NATS_NKEY_SEED_FILE" in said


async def test_a_reader_may_not_submit_a_run(world: World, run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENFORGE_NATS_NKEY_SEED_FILE", str(world.credentials.seed(CONSUMER, "reader")))
    said = await refused(run_file, world.server.url)
    assert "these credentials may not use" in said
    async with world.bus(OPERATOR) as bus:
        assert await bus.count(RunSubmitted, "r") == 0


async def test_a_name_that_another_run_has_is_refused_by_field(as_operator: World, run_file: Path) -> None:
    facts = PretendRun(load_run_file(run_file, ["run.seed=7"])).run(until_s=0).facts
    async with as_operator.bus(OPERATOR) as bus:
        await bus.tell_all([fact for _, fact in facts])
    said = await refused(run_file, as_operator.server.url)
    assert "run.seed: 7 -> 0" in said
    assert "give run.name another value" in said


def test_a_model_that_is_built_in_nowhere_is_refused_here(run_file: Path) -> None:
    result = checked(run_file, "nats://127.0.0.1:1", "--set", "model.path=builtin:huge")
    assert result.exit_code == 2
    assert "choose one of" in result.output


def test_a_dry_run_says_where_the_run_would_go(run_file: Path) -> None:
    result = checked(run_file, "nats://there:4222", "--dry-run")
    assert result.exit_code == 0, result.output
    assert "submitted to nats://there:4222" in result.output


async def test_ctrl_c_detaches_and_the_same_command_joins_the_run_and_sees_it_end(
    as_operator: World, run_file: Path
) -> None:
    first = await trainer(run_file, as_operator.server.url)
    await until_submitted(as_operator)
    first.send_signal(signal.SIGINT)
    said, _ = await first.communicate()
    assert first.returncode == 130
    assert b"detached: run 'r' goes on" in said
    assert b"openforge stop r" in said

    facts = PretendRun(load_run_file(run_file)).run().facts
    async with as_operator.bus(OPERATOR) as bus:
        await bus.tell_all([fact for _, fact in facts if not isinstance(fact, RunSubmitted)])
    second = await trainer(run_file, as_operator.server.url)
    said, _ = await second.communicate()
    assert second.returncode == 0, said
    assert b"step 2/2" in said
    assert b"ledger_closes" in said
    async with as_operator.bus(OPERATOR) as bus:
        assert await bus.count(RunSubmitted, "r") == 1
        stopped = await bus.find(RunStopped, "r", 0)
    assert stopped is not None
    assert stopped.fact.reason is StopReason.COMPLETED


async def test_a_run_that_stands_still_is_ended_with_its_reason(as_operator: World, run_file: Path) -> None:
    command = await trainer(run_file, as_operator.server.url, "--set", "run.no_progress_s=1")
    said, _ = await command.communicate()
    assert command.returncode == 4, said
    assert b"r stopped: no_progress. nothing moved for" in said
    async with as_operator.bus(OPERATOR) as bus:
        stopped = await bus.find(RunStopped, "r", 0)
    assert stopped is not None
    assert stopped.fact.reason is StopReason.NO_PROGRESS
    assert "since 'run submitted' (0 in flight)" in stopped.fact.detail


def test_a_run_that_nobody_takes_up_is_remarked_on_after_a_while(run_file: Path) -> None:
    (at, submitted), *_ = PretendRun(load_run_file(run_file)).run(until_s=0).facts
    progress = Progress()
    assert remark_on(progress, "r", at + 2 * UNTOUCHED_S) == ""
    progress.apply(submitted, at)
    assert remark_on(progress, "r", at + 1) == ""
    assert "OPENFORGE_RUN=r" in remark_on(progress, "r", at + UNTOUCHED_S)

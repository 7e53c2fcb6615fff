"""The commands on runs that work, rest, or never were. The facts come from a run in virtual time."""

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from click.testing import Result
from pretend_run import PretendRun, Weather
from typer.testing import CliRunner

from openforge.bus import Bus, BusSettings
from openforge.bus.server import NatsServer, ServerConfig, free_port
from openforge.cli.home import BusAddress, Home
from openforge.cli.main import app, main
from openforge.cli.reach import bus_of
from openforge.models import tiny
from openforge.protos import BatchTrained, RunStopped, StopReason
from openforge.runs import RunConfig


def config() -> RunConfig:
    return msgspec.convert(
        {
            "run": {"name": "r", "steps": 2},
            "model": {"path": "/m"},
            "environment": {"name": "shell", "harness": "mini"},
            "pacing": {"groups_per_step": 2, "group_size": 2, "in_flight": 8, "max_lag": 1},
            "evaluation": {"heldout_episodes": 3},
        },
        RunConfig,
    )


async def told_at(home: Home, facts: list[object]) -> None:
    """Leaves a run that rests: its store, no server."""
    home.make()
    server = NatsServer(ServerConfig(folder=str(home.nats), port=free_port()))
    await server.start()
    async with Bus.connect(BusSettings(url=server.url, blobs=str(home.blobs)), name="test") as bus:
        await bus.set_up()
        await bus.tell_all(facts)
    await server.stop()


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPENFORGE_RUNS", str(tmp_path / "runs"))
    monkeypatch.delenv("OPENFORGE_NATS_URL", raising=False)
    return tmp_path / "runs"


@pytest.fixture
async def resting(runs: Path) -> Home:
    home = Home("r")
    world = PretendRun(config(), Weather(failing=0.2, seed=5)).run()
    await told_at(home, [fact for _, fact in world.facts])
    return home


@pytest.fixture
async def working(resting: Home) -> AsyncIterator[Home]:
    """The run's server is up and its address is told, as a supervisor does."""
    server = NatsServer(ServerConfig(folder=str(resting.nats), port=free_port()))
    with resting.held():
        await server.start()
        resting.tell_address(BusAddress(nats_url=server.url, pid=os.getpid()))
        yield resting
        resting.forget_address()
        await server.stop()


async def openforge(*arguments: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, app, list(arguments))


async def process(*arguments: str) -> tuple[int, str]:
    """The command as a process of its own: its exit code, and what it said on standard error."""
    paths = os.pathsep.join(path for path in sys.path if path)
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "openforge.cli", *arguments),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths},
    )
    _, said = await child.communicate()
    return child.returncode or 0, said.decode()


async def test_the_ledger_of_a_resting_run_is_read_from_its_own_store(resting: Home) -> None:
    result = await openforge("ledger", "r", "--json")
    assert result.exit_code == 0, result.output
    ledger = msgspec.json.decode(result.stdout)
    assert ledger["closes"] is True
    assert ledger["versions"] == 2
    text = (await openforge("ledger", "r")).stdout
    assert "training: requested" in text
    assert text.rstrip().endswith("closes")


async def test_the_doctor_looks_at_a_run_that_rests(resting: Home) -> None:
    looked = await openforge("doctor", "r", "--no-sandbox", "--json", "--free-mb", "0")
    found = {finding["check"]: finding["state"] for finding in msgspec.json.decode(looked.stdout)}
    assert {"bus": "ok", "streams": "ok", "blobs": "ok", "run": "ok", "credentials": "ok"}.items() <= found.items()
    assert re.search(r'"said":"nats-server 2\.\d+\.\d+ at nats://', looked.stdout)
    assert resting.address() is None


async def test_the_ledger_of_a_working_run_is_read_from_its_bus(working: Home) -> None:
    assert (await openforge("ledger", "r")).exit_code == 0


async def test_a_ledger_that_does_not_close_ends_with_1_and_says_why(runs: Path) -> None:
    world = PretendRun(config()).run()
    facts = [fact for _, fact in world.facts]
    lost = next(fact for fact in facts if fact.kind == "trajectory" and fact.group.startswith("g"))
    await told_at(Home("r"), [fact for fact in facts if fact is not lost])
    result = await openforge("ledger", "r")
    assert result.exit_code == 1
    assert "DOES NOT CLOSE" in result.stdout
    assert "without a verdict" in result.stdout


async def test_a_message_that_is_no_fact_is_named_with_its_subject(working: Home) -> None:
    subject = BatchTrained.subject_for("r", 99)
    async with bus_of("r") as bus:
        await bus.link.publish(subject, b"no fact", {})
    _, said = await process("ledger", "r")
    assert f"dead letter: undecodable (subject {subject}, sequence " in said


async def test_two_commands_on_a_resting_run_take_turns(resting: Home) -> None:
    ended = await asyncio.gather(*(process("ledger", "r", "--json") for _ in range(2)))
    assert [code for code, _ in ended] == [0, 0], ended


async def test_tail_shows_readable_lines_and_json_and_filters(working: Home) -> None:
    lines = (await openforge("tail", "r", "--once")).stdout.splitlines()
    assert any("RunSubmitted" in line and "generation 0" in line for line in lines)
    assert any("BatchTrained" in line and "v2: 4 episodes of 2 groups" in line for line in lines)
    batches = (await openforge("tail", "r", "--once", "--json", "--fact", "BatchTrained")).stdout.splitlines()
    assert [msgspec.json.decode(batch)["fact"]["version"] for batch in batches] == [1, 2]
    group = (await openforge("tail", "r", "--once", "--episode", "g000001")).stdout.splitlines()
    assert group
    assert all("g000001" in line for line in group)
    assert (await openforge("tail", "r", "--once", "--new")).stdout == ""
    every = (await openforge("tail", "r", "--once", "--since", "1h")).stdout.splitlines()
    assert len(every) == len(lines)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--kinds", "turns"), "there is no stream 'turns'"),
        (("--fact", "TurnStarted"), "there is no fact 'TurnStarted'"),
        (("--since", "yesterday"), "--since yesterday: write 30s"),
    ],
)
async def test_tail_refuses_what_it_does_not_know(arguments: tuple[str, str], said: str) -> None:
    result = await openforge("tail", "r", *arguments)
    assert result.exit_code == 2
    assert said in result.output


async def test_status_says_how_a_run_stands_and_which_runs_there_are(working: Home) -> None:
    result = await openforge("status", "r")
    assert result.exit_code == 0, result.output
    assert "run r: finished, submitted" in result.stdout
    assert "steps 2 of 2" in result.stdout
    assert "held out at version 2" in result.stdout
    standing = msgspec.json.decode((await openforge("status", "r", "--json")).stdout)
    assert (standing["steps"], standing["finished"], standing["stuck"]) == (2, True, None)
    assert (await openforge("status")).stdout.split() == ["r", "running"]


async def test_a_run_is_paused_resumed_and_stopped(working: Home) -> None:
    assert "generation 0 paused" in (await openforge("pause", "r")).stdout
    assert "paused" in (await openforge("status", "r")).stdout
    assert "generation 1 submitted" in (await openforge("resume", "r")).stdout
    assert "generation 1 stopped" in (await openforge("stop", "r", "--no-wait")).stdout
    async with Bus.connect(BusSettings(url=working.address().nats_url), name="test") as bus:
        stopped = await bus.find(RunStopped, "r", 1)
    assert stopped is not None
    assert stopped.fact.reason is StopReason.INTERRUPTED


async def test_the_page_of_a_run_is_written_again_from_its_streams(runs: Path, tmp_path: Path) -> None:
    model = tiny(tmp_path / "model")
    run = msgspec.structs.replace(config(), model=msgspec.structs.replace(config().model, path=str(model)))
    await told_at(Home("r"), [fact for _, fact in PretendRun(run, Weather(seed=2)).run().facts])
    result = await openforge("report", "r")
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == str(Home("r").report)
    assert "</html>" in Home("r").report.read_text()
    summary = msgspec.json.decode(Home("r").summary.read_bytes())
    assert (summary["steps"], summary["ledger_closes"]) == (2, True)
    Home("r").summary.with_suffix(".tmp").symlink_to("/dev/full")
    where = f"[Errno 28] No space left on device: '{Home('r').root}'"
    full = f"openforge: {where}: make room on that disk, or name a place on another\n"
    assert await process("report", "r") == (1, full)


async def test_a_page_without_the_models_tokenizer_says_what_is_missing(resting: Home) -> None:
    result = await openforge("report", "r")
    assert result.exit_code == 1
    assert "model.path = /m has no tokenizer.json" in result.output


async def test_a_run_that_nobody_knows_is_said_so_with_the_way_out(runs: Path) -> None:
    for command in ("ledger", "status", "stop", "tail"):
        result = await openforge(command, "nothing")
        assert result.exit_code == 1
        assert "run 'nothing' has no folder" in result.output
        assert "OPENFORGE_NATS_URL" in result.output


async def test_a_name_that_was_never_submitted_ends_with_2(
    runs: Path, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENFORGE_NATS_URL", bus.settings.url)
    for command in ("ledger", "status", "stop"):
        result = await openforge(command, "nothing")
        assert result.exit_code == 2
        assert "was never submitted" in result.output


async def test_a_bus_that_is_not_there_is_named(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"nats://127.0.0.1:{free_port()}"
    monkeypatch.setenv("OPENFORGE_NATS_URL", url)
    monkeypatch.setenv("OPENFORGE_NATS_CONNECT_TIMEOUT_S", "0.5")
    result = await openforge("tail", "--once")
    assert result.exit_code == 1
    assert f"no NATS server answered at {url}" in result.output
    assert "set OPENFORGE_NATS_URL" in result.output


async def test_environments_are_listed_checked_for_and_begun(tmp_path: Path) -> None:
    assert "shell" in (await openforge("env", "list")).stdout
    assert "harnesses: " in (await openforge("env", "list", "shell")).stdout
    assert "is not installed" in (await openforge("env", "list", "nowhere")).output
    assert (await openforge("env", "new", "mine", "--in", str(tmp_path))).exit_code == 0
    assert (tmp_path / "mine" / "env.py").is_file()
    again = await openforge("env", "new", "mine", "--in", str(tmp_path))
    assert again.exit_code == 2
    assert "already there" in again.output


async def test_models_are_listed_and_an_unknown_one_is_refused() -> None:
    assert "smollm2-135m" in (await openforge("model", "list")).stdout
    refused = await openforge("model", "get", "gpt-6")
    assert refused.exit_code == 2
    assert "choose one of smollm2-135m, tiny" in refused.output


async def test_schemas_are_written_and_checked(tmp_path: Path) -> None:
    assert (await openforge("protos", "schema", "--out", str(tmp_path))).exit_code == 0
    assert (await openforge("protos", "schema", "--out", str(tmp_path), "--check")).exit_code == 0
    (tmp_path / "asyncapi.json").write_text("{}")
    assert (await openforge("protos", "schema", "--out", str(tmp_path), "--check")).exit_code == 1


async def test_measurements_are_listed_and_an_unknown_one_is_refused() -> None:
    assert "proxy" in (await openforge("bench")).stdout.split()
    refused = await openforge("bench", "luck")
    assert refused.exit_code == 2
    assert "choose from" in refused.output


async def test_every_command_explains_itself() -> None:
    for command in (
        ["train"],
        ["up"],
        ["report"],
        ["status"],
        ["stop"],
        ["pause"],
        ["resume"],
        ["tail"],
        ["ledger"],
        ["bench"],
        ["model", "get"],
        ["model", "tiny"],
        ["model", "list"],
        ["env", "list"],
        ["env", "check"],
        ["env", "new"],
        ["protos", "schema"],
    ):
        result = await openforge(*command, "--help")
        assert result.exit_code == 0
        assert "Usage" in result.stdout


@pytest.mark.parametrize("command", ["status", "tail", "ledger", "report", "stop"])
def test_a_name_that_no_run_can_have_is_refused_in_one_line(runs: Path, command: str) -> None:
    for name in ("../x", "a b", ""):
        result = CliRunner().invoke(app, [command, name])
        assert isinstance(result.exception, SystemExit), result.exception
        assert result.exit_code == 2
        assert result.output == (
            f"openforge: run = {name!r} cannot be part of a subject: use 1 to 128 of A-Z a-z 0-9 _ -\n"
        )


def test_a_folder_of_runs_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a-file").touch()
    monkeypatch.setenv("OPENFORGE_RUNS", str(tmp_path / "a-file"))
    monkeypatch.delenv("OPENFORGE_NATS_URL", raising=False)
    result = CliRunner().invoke(app, ["train", TINY])
    assert result.exit_code == 1
    assert result.output.startswith(
        f"openforge: the folder of the run, {tmp_path / 'a-file' / 'tiny'}, cannot be written"
    )
    assert "set OPENFORGE_RUNS" in result.output
    assert CliRunner().invoke(app, ["status", "tiny"]).exit_code == 1


TINY = str(Path(__file__).parents[3] / "examples" / "tiny.toml")


@pytest.mark.parametrize(
    "command",
    [
        ("train", "nowhere.toml"),
        ("train", TINY, "--set", "run.steps=-1"),
        ("train", TINY, "--set", "model.path=builtin:nothing"),
        ("train", TINY, "--remote", "nats://127.0.0.1:9", "--set", "model.path=builtin:nothing"),
        ("up", "nowhere.toml"),
        ("eval", "nowhere.toml"),
        ("eval", TINY, "--model", "m"),
        ("eval", TINY, "--version", "nobody@3"),
        ("status", "nobody"),
        ("pause", "nobody"),
        ("resume", "nobody"),
        ("stop", "nobody"),
        ("tail", "nobody"),
        ("ledger", "nobody"),
        ("report", "nobody"),
        ("metrics", "nobody", "--once"),
        ("sink", "nobody", "--to", "nothing"),
        ("export", "nobody", "--out", "there"),
        ("import", "nowhere"),
        ("checkpoint", "list", "nobody"),
        ("model", "get", "nothing"),
        ("env", "check", "nothing"),
        ("env", "new", "Not-a-name"),
        ("env", "new", "x", "--in", "/proc"),
        ("env", "list", "broken/env.py"),
        ("env", "check", "broken/env.py"),
        ("doctor", "a b"),
        ("import", "broken/env.py"),
        ("model", "tiny", "broken"),
        ("model", "get", "tiny", "--to", "/proc/x"),
        ("bench", "nothing"),
        ("conformance", "nothing"),
        ("bus", "credentials", "--run", "nobody", "--consumer", "a b"),
    ],
    ids=" ".join,
)
def test_every_command_says_why_it_ends_in_the_same_form(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "env.py").write_text("1 / 0")
    result = CliRunner().invoke(app, command)
    assert result.exit_code in (1, 2), result.output
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.stderr.startswith("openforge: "), result.output


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("bus", "credentials", "--out", "/proc/x"), "openforge: [Errno 2] No such file or directory: '/proc/x': name"),
        (("protos", "schema", "--out", "file/x"), "openforge: [Errno 20] Not a directory: 'file/x': name another"),
    ],
    ids=["credentials", "schema"],
)
def test_a_place_that_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str], said: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["openforge", *command])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith(said)


def test_a_broken_address_is_one_that_nobody_answers_at(runs: Path) -> None:
    home = Home("r")
    home.make()
    (home.root / "bus.json").write_bytes(b"\xff{")
    assert home.address() is None
    assert "resting" in CliRunner().invoke(app, ["status"]).output

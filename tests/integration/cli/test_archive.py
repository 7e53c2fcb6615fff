"""A run that was exported and imported is the same run, and its tables say what its facts say."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest
from fact_examples import FACTS, RUN
from pretend_run import PretendRun, Weather

from openforge.bus import KINDS, Bus, BusSettings
from openforge.bus.server import NatsServer, ServerConfig, free_port
from openforge.cli import archive
from openforge.cli.export_command import export, import_
from openforge.protos import Fact, RunPaused, TrajectoryVerified
from openforge.runs import RunConfig, ledger_of

CONFIG = msgspec.convert(
    {
        "run": {"name": "r", "steps": 3, "seed": 3},
        "model": {"path": "/m"},
        "environment": {"name": "shell", "harness": "mini"},
        "pacing": {"groups_per_step": 2, "group_size": 3, "in_flight": 24, "max_lag": 1},
        "evaluation": {"heldout_episodes": 4},
    },
    RunConfig,
)


@pytest.fixture
async def other_bus(tmp_path: Path) -> AsyncIterator[Bus]:
    """Another server, where nothing is told yet."""
    server = NatsServer(ServerConfig(folder=str(tmp_path / "other"), port=free_port()))
    await server.start()
    async with Bus.connect(BusSettings(url=server.url), name="test") as bus:
        await bus.set_up()
        yield bus
    await server.kill()


async def bytes_of(bus: Bus, kind: str, run: str) -> list[tuple[str, bytes]]:
    return [(place.subject, data) async for place, data in bus.as_told(kind, run)]


async def test_a_run_that_was_exported_and_imported_has_the_same_facts_and_ledger(
    bus: Bus, other_bus: Bus, tmp_path: Path
) -> None:
    facts: list[Fact] = [fact for _, fact in PretendRun(CONFIG, Weather(failing=0.3, seed=4)).run().facts]
    await bus.tell_all(facts)
    newer = msgspec.msgpack.encode(msgspec.to_builtins(RunPaused(run="r", generation=9)) | {"invented_later": [1]})
    await bus.tell_again([("of.r.run.paused.9", newer)])
    counts = await archive.export(bus, "r", tmp_path / "out")
    assert counts.facts == len(facts) + 1
    assert counts.unreadable == 0
    assert archive.run_of(tmp_path / "out") == "r"
    for _ in range(2):  # again changes nothing
        await archive.tell_all(other_bus, tmp_path / "out")
    for kind in KINDS:
        assert await bytes_of(other_bus, kind, "r") == await bytes_of(bus, kind, "r")
    ledger = await ledger_of(other_bus, "r")
    assert ledger == await ledger_of(bus, "r")
    assert ledger.closes
    episodes = pq.read_table(tmp_path / "out" / "episodes").to_pylist()
    trained = [row for row in episodes if row["trained_version"] is not None]
    assert len(trained) == ledger.train.done.episodes > 0
    assert sum(row["sampled_tokens"] for row in trained) == ledger.train.done.tokens
    failed = [row for row in episodes if row["failed"] is not None]
    assert len(failed) == sum(tally.episodes for tally in ledger.train.failed_attempts.values()) + sum(
        tally.episodes for tally in ledger.eval.failed_attempts.values()
    )


async def test_the_tables_hold_the_golden_values_and_the_card_names_them(bus: Bus, tmp_path: Path) -> None:
    await bus.tell_all(FACTS)
    out = tmp_path / "out"
    await archive.export(bus, RUN, out)
    (sequence,) = pq.read_table(out / "sequences").to_pylist()
    assert sequence["ids"] == [5, 6, 7, 8, 9]
    assert sequence["loss_positions"] == [3, 4]
    assert sequence["logprobs"] == [-0.5, -0.25]
    assert sequence["versions"] == [3, 3]
    assert (sequence["reward"], sequence["env"], sequence["turns"]) == (1.0, "shell", [0])
    (turn,) = pq.read_table(out / "turns").to_pylist()
    assert turn["suffix_ids"] == [5, 6, 7]
    assert turn["sampled_ids"] == [8, 9, 2]
    assert turn["versions"] == [3, 3, 4]
    assert turn["messages"] == '[{"role":"user","content":"hi"}]'
    (episode,) = pq.read_table(out / "episodes").to_pylist()
    assert (episode["reward"], episode["trained_version"], episode["retired"]) == (1.0, 4, None)
    assert episode["metrics"] == '{"checks":2.0}'
    card = (out / "README.md").read_text()
    named = [line.split(": ")[1] for line in card.splitlines() if line.startswith("  data_files: ")]
    assert {next(out.glob(pattern)).parent.name for pattern in named} == {"sequences", "episodes", "turns"}
    with pytest.raises(archive.NotEmpty, match="name a new folder"):
        await archive.export(bus, RUN, out)
    with pytest.raises(archive.BadArchive, match="openforge export"):
        archive.run_of(tmp_path)


_READER = """
import sys
from datasets import get_dataset_config_names, load_dataset
for name in get_dataset_config_names(sys.argv[1]):
    rows = load_dataset(sys.argv[1], name)["train"]
    print(name, len(rows), rows[0]["reward"] if "reward" in rows.column_names else "")
"""


async def test_the_folder_is_a_dataset_of_three_tables_to_those_who_load_such(bus: Bus, tmp_path: Path) -> None:
    await bus.tell_all(FACTS)
    await archive.export(bus, RUN, tmp_path / "out")
    offline = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    reader = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _READER, str(tmp_path / "out")), env=offline, stdout=asyncio.subprocess.PIPE
    )
    said, _ = await reader.communicate()
    assert sorted(said.decode().splitlines()) == ["episodes 1 1.0", "sequences 1 1.0", "turns 1 "]


async def test_a_verdict_of_many_sequences_is_as_many_rows(bus: Bus, tmp_path: Path) -> None:
    told = next(fact for fact in FACTS if isinstance(fact, TrajectoryVerified))
    await bus.tell(msgspec.structs.replace(told, sequences=told.sequences * 3))
    assert (await archive.export(bus, RUN, tmp_path / "out")).sequences == 3
    rows = pq.read_table(tmp_path / "out" / "sequences").to_pylist()
    assert [row["index"] for row in rows] == [0, 1, 2]


def test_a_folder_becomes_a_run_that_rests_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands, from one folder of runs to another."""

    async def begin(home: Path) -> None:
        server = NatsServer(ServerConfig(folder=str(home / "nats"), port=free_port()))
        await server.start()
        async with Bus.connect(BusSettings(url=server.url), name="test") as bus:
            await bus.set_up()
            await bus.tell_all(FACTS)
        await server.stop()

    monkeypatch.delenv("OPENFORGE_NATS_URL", raising=False)
    asyncio.run(begin(tmp_path / "runs" / RUN))
    monkeypatch.setenv("OPENFORGE_RUNS", str(tmp_path / "runs"))
    export(RUN, tmp_path / "out")
    monkeypatch.setenv("OPENFORGE_RUNS", str(tmp_path / "elsewhere"))
    import_(tmp_path / "out")
    export(RUN, tmp_path / "out-again")
    assert list(archive.facts_in(tmp_path / "out", ("policy",)))
    for kind in KINDS:
        before, after = (
            [record._replace(at=0.0) for record in archive.facts_in(tmp_path / name, (kind,))]
            for name in ("out", "out-again")
        )
        assert before == after
    assert f"run {RUN}: {len(FACTS)} facts are on the bus" in capsys.readouterr().out

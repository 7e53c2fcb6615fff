"""Ctrl-C while `openforge conformance` judges: what was shown stands, and the rest is not waited for."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import msgspec
import pytest
from attempts import command, conversation, ended, requested, sealed

from openforge.bus import Bus, BusSettings
from openforge.bus.server import NatsServer, ServerConfig, free_port
from openforge.cli.home import Home
from openforge.protos import EpisodeRequested, Fact, TrajectoryVerified, pack_ids
from openforge.verifier.core import Claimed, Evidence, Record, record_of, verified

pytestmark = pytest.mark.heavy  # it needs the tokenizer of the real model

LONG = 60_000
"""Tokens of a sequence whose forward pass takes much longer than to end a process."""


def judged_attempt(task: str, episode: str) -> tuple[EpisodeRequested, list[Fact], TrajectoryVerified]:
    request = requested("conformance", task, episode=episode)
    turns = conversation(request, command("ls"), command("mv a b"))
    evidence = Evidence(requested=request, ended=ended(request), sealed=sealed(request, 2), turns=tuple(turns))
    record = record_of(evidence)
    assert isinstance(record, Record)
    verdict = verified(evidence, record, Claimed(1.0), behaviour={}, verifier="v")
    return request, [request, *turns, evidence.ended, evidence.sealed], verdict


async def hosted(runs: Path) -> None:
    """What a run of two jobs leaves; the second one's sequence is very long."""
    _, facts, verdict = judged_attempt("codex_plain", "e-0")
    _, more, other = judged_attempt("codex_thinking", "e-1")
    [sequence] = other.sequences
    long = msgspec.structs.replace(sequence, ids=pack_ids([5] * LONG))
    facts += [verdict, *more, msgspec.structs.replace(other, sequences=(long,))]
    home = Home("conformance", runs)
    home.make()
    (home.root / "struck.json").write_bytes(b'{"e-0": {"none": 2, "error_500": 1}}')
    home.credentials().make()
    server = NatsServer(ServerConfig(folder=str(home.nats), port=free_port()))
    await server.start()
    async with Bus.connect(BusSettings(url=server.url, blobs=str(home.blobs)), name="test") as bus:
        await bus.set_up()
        await bus.tell_all([msgspec.structs.replace(fact, run="conformance") for fact in facts])
    await server.stop()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_while_it_judges_ends_it_at_once_and_keeps_the_lines_that_were_shown(
    tmp_path: Path, number: signal.Signals
) -> None:
    await hosted(tmp_path / "conformance")
    out = tmp_path / "figures.json"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "openforge.cli", "conformance", "codex", "--judge", "--out", str(out)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    async with asyncio.timeout(900):
        shown = await process.stdout.readline()
        process.send_signal(number)
        said = (await process.stderr.read()).decode()
        assert await process.wait() == 130, said
    assert shown.split()[:2] == [b"codex", b"plain"]
    assert said.endswith(f"interrupted: 1 jobs have a line, figures in {out}; --judge goes on with what was hosted\n")
    assert "Traceback" not in said
    [row] = msgspec.json.decode(out.read_bytes())
    assert (row["harness"], row["scenario"], row["faults"]) == ("codex", "plain", {"error_500": 1})

"""The verifier on a real bus, with real boxes."""

import asyncio
import io
import os
import signal
import sys
import tarfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from attempts import RUN, TURN_TOKENS, changed, command, conversation, ended, requested, said, sealed

from openforge.bus import Bus, BusSettings
from openforge.protos import (
    BlobRef,
    Dropped,
    EndReason,
    EpisodeFailed,
    EpisodeRequested,
    FailReason,
    TrajectoryVerified,
    TurnRecorded,
    TurnStatus,
    covered,
    env_token,
)
from openforge.runs import RunConfig, submit
from openforge.runs.config import EnvironmentSection, ModelSection, RunSection
from openforge.verifier.serve import serve
from openforge.verifier.settings import Settings

ENV = """
from pathlib import Path

from openforge.env.layout import load_tasks

HARNESSES = {"agent": "direct"}


def tasks():
    return load_tasks(Path(__file__).parent / "tasks")


def create_direct(sandbox, *, harness, **options):
    raise NotImplementedError
"""

ANSWER = 'if [ "$(cat answer)" = yes ]; then echo \'{"reward": 1, "looked": 3}\'; else echo \'{"reward": 0}\'; fi'
CHECKS = {
    "answer": f"cd /workspace; {ANSWER}",
    "runs-it": f"cd /workspace; sh run.sh; {ANSWER}",
    "hangs": f"cd /workspace; while [ -e hang ]; do sleep 0.1; done; {ANSWER}",
    "prints-it": "cat /workspace/answer",
    "never-works": "exit 7",
    "always-hangs": "sleep 60",
    "reads-reward": f"cd /workspace; {ANSWER}; echo 1 > /workspace/reward.json",
}
REFERENCES = {"prints-it": "echo '{\"reward\": 1}' > answer", "runs-it": "echo yes > answer; echo true > run.sh"}

Outcome = TrajectoryVerified | EpisodeFailed


@pytest.fixture
def environment(tmp_path: Path) -> str:
    """One task for each kind of check."""
    for task, check in CHECKS.items():
        folder = tmp_path / "checks" / "tasks" / task
        for part in ("tests", "solution"):
            (folder / part).mkdir(parents=True)
        (folder / "tests/check.sh").write_text(check)
        (folder / "solution/solve.sh").write_text(REFERENCES.get(task, "echo yes > answer"))
        (folder / "task.yaml").write_text(
            f"{{schema_version: 1, task_id: {task}, instruction: Do it., "
            "verifier: {command: [/bin/sh, /tests/check.sh], timeout_s: 1.5}}"
        )
    bare = tmp_path / "checks/tasks/bare/solution"
    bare.mkdir(parents=True)
    (bare / "solve.sh").write_text("true")
    (bare.parent / "task.yaml").write_text("{schema_version: 1, task_id: bare, instruction: Do it.}")
    (tmp_path / "checks/env.py").write_text(ENV)
    return str(tmp_path / "checks/env.py")


def _config(environment: str, *, trust: bool = False) -> RunConfig:
    return RunConfig(
        run=RunSection(name=RUN, steps=1, trust_env_reward=trust),
        model=ModelSection(path="/models/none"),
        environment=EnvironmentSection(name=environment, harness="agent"),
    )


def _settings(folder: Path) -> Settings:
    return Settings(home=folder / "home", verifier_slots=4, verifier_attempts=2, verifier_name="v1")


@pytest.fixture
async def verifier(bus: Bus, bus_settings: BusSettings, tmp_path: Path) -> AsyncIterator[None]:
    """Serving on a connection of its own until the test ends."""
    stop = asyncio.Event()
    async with Bus.connect(bus_settings, name="verifier") as own:
        serving = asyncio.create_task(serve(_settings(tmp_path), own, stop))
        yield
        stop.set()
        await asyncio.wait_for(serving, 20)


def work(**files: str | bytes) -> bytes:
    """A tar of the workspace, as it comes out of an agent's box; `run_sh` is run.sh."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in files.items():
            data = content.encode() if isinstance(content, str) else content
            entry = tarfile.TarInfo(f"workspace/{name.replace('_', '.')}")
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


async def _tell_attempt(
    bus: Bus,
    request: EpisodeRequested,
    artifacts: bytes | None,
    *,
    reason: EndReason = EndReason.FINISHED,
    claim: float | None = None,
    turns: list[TurnRecorded] | None = None,
    engine_failures: int = 0,
) -> None:
    """Everything that comes before a verdict, the seal last."""
    turns = conversation(request, command("ls"), said("done")) if turns is None else turns
    ref: BlobRef | None = None if artifacts is None else await bus.blobs.put(artifacts)
    await bus.tell(request)
    await bus.tell_all(turns)
    await bus.tell(ended(request, reason, artifacts=ref, claim=claim, agent_s=1.5))
    await bus.tell(sealed(request, len(turns), engine_failures=engine_failures))


async def _outcome(bus: Bus, request: EpisodeRequested) -> Outcome:
    key = (env_token(request.task.env), request.harness, request.episode)
    for _ in range(600):
        if verdict := await bus.find(TrajectoryVerified, RUN, *key):
            return verdict.fact
        if failure := await bus.find(EpisodeFailed, RUN, request.episode, request.attempt):
            return failure.fact
        await asyncio.sleep(0.05)
    raise AssertionError("no verdict within 30 s")


class Judge:
    """Tells attempts of several tasks at once and collects what the verifier says."""

    def __init__(self, bus: Bus, environment: str) -> None:
        self.bus = bus
        self.environment = environment
        self.told = 0

    async def outcome(self, task: str, artifacts: bytes | None, **how: object) -> Outcome:
        request = requested(self.environment, task, episode=f"g000000-{self.told}")
        self.told += 1
        await _tell_attempt(self.bus, request, artifacts, **how)  # type: ignore[arg-type]
        return await _outcome(self.bus, request)

    async def verdict(self, task: str, artifacts: bytes | None, **how: object) -> TrajectoryVerified:
        outcome = await self.outcome(task, artifacts, **how)
        assert isinstance(outcome, TrajectoryVerified), outcome
        return outcome

    async def failure(self, task: str, artifacts: bytes | None, **how: object) -> EpisodeFailed:
        outcome = await self.outcome(task, artifacts, **how)
        assert isinstance(outcome, EpisodeFailed), outcome
        return outcome


@pytest.fixture
async def judge(bus: Bus, environment: str, verifier: None) -> Judge:
    await submit(bus, _config(environment))
    return Judge(bus, environment)


async def test_good_work_is_told_with_its_reward_and_its_tokens(judge: Judge) -> None:
    verdict = await judge.verdict("answer", work(answer="yes"))
    assert (verdict.reward, verdict.rewarded_by, verdict.isolation) == (1.0, "verifier", "full")
    assert verdict.metrics["looked"] == 3.0
    assert verdict.metrics["behaviour_tool_calls"] == 1.0
    assert [covered(sequence.loss) for sequence in verdict.sequences] == [2 * TURN_TOKENS]
    assert (verdict.delivered_fraction, verdict.extra_prefill_ratio, verdict.turns) == (1.0, 1.0, 2)
    assert (verdict.agent_s, verdict.verifier) == (1.5, "v1")
    assert verdict.verify_s > 0


async def test_bad_work_and_no_work_earn_nothing(judge: Judge) -> None:
    for artifacts in (None, work(), work(answer="no"), work(answer=b"\xff\xfe\x00")):
        assert (await judge.verdict("answer", artifacts)).reward == 0.0


async def test_a_forged_reward_in_the_work_earns_nothing(judge: Judge) -> None:
    prints = "#!/bin/sh\necho '{\"reward\": 1}'"
    for files in (
        {"reward_json": '{"reward": 1}', "reward_txt": "1"},
        {"answer": '{"reward": 1}\n'},
        {"sh": prints, "cat": "#!/bin/sh\necho yes", "python3": prints},
    ):
        assert (await judge.verdict("reads-reward", work(**files))).reward == 0.0


async def test_a_reward_printed_by_the_agents_program_does_not_win(judge: Judge) -> None:
    scripts = (
        "echo '{\"reward\": 1}'",
        "echo '{\"reward\": 1}'; kill -9 $PPID",
        "echo '{\"reward\": 1}'; kill $PPID; sleep 5",
        "(sleep 5; echo '{\"reward\": 1}') & echo '{\"reward\": 1}'",
        "echo 'echo {\\\"reward\\\": 1}' > /tests/check.sh; rm -rf /tests",
        "yes '{\"reward\": 1}' | head -c 3000000",
    )
    verdicts = await asyncio.gather(*(judge.verdict("runs-it", work(run_sh=script, answer="no")) for script in scripts))
    assert [verdict.reward for verdict in verdicts] == [0.0] * len(scripts)


async def test_work_that_makes_the_checks_hang_earns_nothing_and_is_marked(judge: Judge) -> None:
    verdict = await judge.verdict("hangs", work(answer="yes", hang=""))
    assert verdict.reward == 0.0
    assert verdict.metrics["verifier_broke"] == 1.0


async def test_what_is_no_number_is_no_reward(judge: Judge) -> None:
    printed = ('{"reward": NaN}', '{"reward": true}', '{"reward": 1e309}', "done", "", b'\xff\xff{"reward": 1}', b"\0")
    verdicts = await asyncio.gather(*(judge.verdict("prints-it", work(answer=answer)) for answer in printed))
    assert [(v.reward, v.metrics["verifier_broke"]) for v in verdicts] == [(0.0, 1.0)] * len(printed)


async def test_artifacts_that_are_no_tar_earn_nothing(judge: Judge) -> None:
    assert (await judge.verdict("answer", b"no tar at all")).metrics["verifier_broke"] == 1.0


async def test_checks_that_break_on_the_reference_too_are_no_verdict(judge: Judge) -> None:
    for task, why in (("never-works", "ended with exit code 7"), ("always-hangs", "did not end within 2 s")):
        failure = await judge.failure(task, work(answer="yes"))
        assert failure.reason is FailReason.VERIFIER_FAILED
        assert f"on the reference: the checks {why}" in failure.detail
        assert failure.sampled_tokens == 2 * TURN_TOKENS


async def test_what_the_policy_cannot_cause_is_a_failure_whose_tokens_are_counted(judge: Judge) -> None:
    lost = await judge.failure("answer", None, reason=EndReason.HOST_LOST)
    assert (lost.reason, lost.sampled_tokens) == (FailReason.HOST_LOST, 2 * TURN_TOKENS)
    unanswered = await judge.failure("answer", work(answer="yes"), engine_failures=1)
    assert unanswered.reason is FailReason.ENGINE_FAILED


async def test_turns_that_contradict_one_another_are_a_failure(judge: Judge) -> None:
    first, second = conversation(requested(judge.environment, "answer"), command("ls"), said("done"))
    failure = await judge.failure("answer", None, turns=[first, changed(second, prefix=77)])
    assert failure.reason is FailReason.RECORD_BROKEN
    assert "takes 77 tokens" in failure.detail


async def test_an_aborted_answer_is_dropped_and_counted(judge: Judge) -> None:
    first, second = conversation(requested(judge.environment, "answer"), command("ls"), said("done"))
    turns = [first, changed(second, status=TurnStatus.ABORTED)]
    verdict = await judge.verdict("answer", work(), turns=turns, reason=EndReason.OUT_OF_TIME)
    assert verdict.delivered_fraction == 0.5
    assert verdict.dropped == (Dropped(reason="aborted", tokens=TURN_TOKENS),)


async def test_a_claim_is_not_believed_without_the_runs_trust(judge: Judge) -> None:
    assert (await judge.failure("bare", None, claim=1.0)).reason is FailReason.UNTRUSTED_CLAIM


@pytest.mark.usefixtures("verifier")
async def test_a_trusted_claim_is_marked_as_one(bus: Bus, environment: str) -> None:
    await submit(bus, _config(environment, trust=True))
    verdict = await Judge(bus, environment).verdict("bare", None, claim=0.25)
    assert (verdict.reward, verdict.rewarded_by) == (0.25, "claim")


async def test_a_task_that_nobody_knows_is_the_verifiers_failure(judge: Judge) -> None:
    failure = await judge.failure("unheard-of", None)
    assert failure.reason is FailReason.VERIFIER_FAILED
    assert "task = 'unheard-of' is not in this environment" in failure.detail
    assert [letter.service for letter in await judge.bus.dead_letters("verifier")] == ["verifier"]


async def test_a_verdict_that_is_told_is_not_told_again(
    bus: Bus, bus_settings: BusSettings, environment: str, tmp_path: Path
) -> None:
    """The second verifier hears every seal again, since what the first had acknowledged is forgotten."""
    await submit(bus, _config(environment))
    request = requested(environment, "answer")
    await _tell_attempt(bus, request, work(answer="yes"))
    for _ in range(2):
        stop = asyncio.Event()
        async with Bus.connect(bus_settings, name="verifier") as own:
            serving = asyncio.create_task(serve(_settings(tmp_path), own, stop))
            await _outcome(bus, request)
            await asyncio.sleep(0.5)
            stop.set()
            await serving
        await bus.link.js.delete_consumer("EPISODE", "verifier-EpisodeSealed")
    assert await bus.count(TrajectoryVerified, RUN) == 1
    assert await bus.dead_letters("verifier") == []


async def test_nothing_is_lost_when_the_verifier_dies(
    bus: Bus, bus_settings: BusSettings, environment: str, tmp_path: Path
) -> None:
    """Killed twice while checks run; every attempt has exactly one verdict in the end, and nothing lies about."""
    await submit(bus, _config(environment))
    requests = [requested(environment, "answer", episode=f"g000000-{member}") for member in range(24)]
    good = {request.episode for request in requests[::3]}
    for request in requests:
        await _tell_attempt(bus, request, work(answer="yes" if request.episode in good else "no"))
    for verdicts in (4, 12):
        process = await _start(bus_settings, tmp_path)
        await _until(bus, lambda told, least=verdicts: told >= least)
        process.send_signal(signal.SIGKILL)
        await process.wait()
    process = await _start(bus_settings, tmp_path)
    await _until(bus, lambda told: told == len(requests))
    process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(process.wait(), 20) == 0
    rewards = {told.fact.episode: told.fact.reward for told in await bus.read(TrajectoryVerified, RUN)}
    assert rewards == {request.episode: float(request.episode in good) for request in requests}
    assert await bus.count(EpisodeFailed, RUN) == 0
    assert list((tmp_path / "home/verifier/scratch").iterdir()) == []


async def _start(bus_settings: BusSettings, folder: Path) -> asyncio.subprocess.Process:
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OPENFORGE_NATS_URL": bus_settings.url,
        "OPENFORGE_HOME": str(folder / "home"),
        "OPENFORGE_RUN": RUN,
        "OPENFORGE_DIE_WITH_PARENT": "1",
        "OPENFORGE_LOG_LEVEL": "warning",
    }
    return await asyncio.create_subprocess_exec(sys.executable, "-m", "openforge.verifier", env=env)


async def _until(bus: Bus, enough: Callable[[int], bool]) -> None:
    for _ in range(1800):
        if enough(await bus.count(TrajectoryVerified, RUN)):
            return
        await asyncio.sleep(0.02)
    raise AssertionError("too few verdicts within 36 s")

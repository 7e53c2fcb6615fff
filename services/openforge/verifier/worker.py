"""Handles one sealed attempt after another: evidence, decision, checks, verdict."""

import asyncio
from collections.abc import AsyncIterator

from openforge.bus import Bus, Told
from openforge.env.contract import TaskInstance
from openforge.env.judge import Judge, JudgeFailed
from openforge.env.registry import draw, load_environment
from openforge.env.verdict import Scored
from openforge.env.verify import CannotVerify, Checker, Work
from openforge.protos import (
    EpisodeFailed,
    EpisodeRequested,
    EpisodeSealed,
    Fact,
    FailReason,
    TaskRef,
    TrajectoryVerified,
    TurnRecorded,
)
from openforge.runs import RunConfig, submitted_config
from openforge.runs.judge import judge_of
from openforge.sandbox.contract import SandboxLimits
from openforge.service import log
from openforge.verifier.behaviour import behaviour_of
from openforge.verifier.core import (
    Claimed,
    Evidence,
    Failure,
    Record,
    failed,
    record_of,
    rewarded_by,
    sampled_tokens,
    verified,
)
from openforge.verifier.evidence import evidence_of, is_decided, transcript_of, work_of


class Verifier:
    """What one verifier process knows: its bus, its boxes, and the run files it has read."""

    def __init__(self, bus: Bus, checker: Checker, name: str) -> None:
        self.bus = bus
        self.checker = checker
        self.name = name
        self._configs: dict[str, RunConfig] = {}
        self._judges: dict[str, Judge | None] = {}

    async def close(self) -> None:
        for judge in self._judges.values():
            if judge is not None:
                await judge.close()

    async def handle(self, told: Told[EpisodeSealed]) -> AsyncIterator[Fact]:
        """Tells the verdict or the failure of one attempt, nothing where that is told already."""
        evidence = await evidence_of(self.bus, told.fact)
        if await is_decided(self.bus, evidence.requested):
            return
        fact = await self.decide(evidence)
        yield fact
        _log(fact)

    async def on_dead(self, told: Told[EpisodeSealed], error: Exception) -> AsyncIterator[Fact]:
        """An attempt that this verifier cannot handle has no verdict; that is not the policy's doing."""
        sealed = told.fact
        turns = await self.bus.read(TurnRecorded, sealed.run, sealed.episode, sealed.attempt)
        yield EpisodeFailed(
            run=sealed.run,
            episode=sealed.episode,
            attempt=sealed.attempt,
            reason=FailReason.VERIFIER_FAILED,
            detail=f"{type(error).__name__}: {error}"[:2000],
            sampled_tokens=sampled_tokens([turn.fact for turn in turns]),
        )

    async def decide(self, evidence: Evidence) -> TrajectoryVerified | EpisodeFailed:
        record = record_of(evidence, (await self._config(evidence.sealed.run)).training)
        if isinstance(record, Failure):
            return failed(evidence, record)
        verdict = await self._verdict(evidence, record)
        if isinstance(verdict, Failure):
            return failed(evidence, verdict)
        return self._verified(evidence, record, verdict)

    async def _verdict(self, evidence: Evidence, record: Record) -> Scored | Claimed | Failure:
        requested, ended = evidence.requested, evidence.ended
        config = await self._config(requested.run)
        instance = await self._instance(requested.task)
        by = rewarded_by(ended, has_checks=bool(instance.verify), trust_env_reward=config.run.trust_env_reward)
        if isinstance(by, Claimed | Failure):
            return by
        if self.checker.isolation == "reduced" and ended.isolation == "full" and not config.run.trusted_only:
            return Failure(
                FailReason.VERIFIER_FAILED,
                "this verifier cannot isolate fully: run it as root, or set run.trusted_only = true",
            )
        transcript = transcript_of(record.conversation) if instance.transcript else b"[]"
        try:
            verdict = await self.checker.verify(
                instance,
                Work(files=await work_of(self.bus, ended), transcript=transcript),
                name=f"v-{requested.run}-{requested.episode}-{requested.attempt}",
                limits=_limits(requested),
                judge=self._judge(config),
            )
        except JudgeFailed as error:
            return Failure(FailReason.JUDGE_FAILED, str(error))
        return Failure(FailReason.VERIFIER_FAILED, verdict.detail) if isinstance(verdict, CannotVerify) else verdict

    def _judge(self, config: RunConfig) -> Judge | None:
        """Raises `JudgeFailed` where its key is not there."""
        run = config.run.name
        if run not in self._judges:
            self._judges[run] = judge_of(config.judge)
        return self._judges[run]

    def _verified(self, evidence: Evidence, record: Record, verdict: Scored | Claimed) -> TrajectoryVerified:
        return verified(
            evidence,
            record,
            verdict,
            behaviour=behaviour_of(record.conversation),
            verifier=self.name,
            isolation=self.checker.isolation,
        )

    async def _instance(self, ref: TaskRef) -> TaskInstance:
        """In a thread: an environment may import much when it is first loaded."""
        return await asyncio.to_thread(lambda: draw(load_environment(ref.env), ref))

    async def _config(self, run: str) -> RunConfig:
        if run not in self._configs:
            self._configs[run], _ = await submitted_config(self.bus, run)
        return self._configs[run]


def _limits(requested: EpisodeRequested) -> SandboxLimits:
    """What the work was done under."""
    limits = requested.limits
    return SandboxLimits(memory_mb=limits.memory_mb, pids=limits.pids, disk_mb=limits.disk_mb, cpus=limits.cpus)


def _log(fact: TrajectoryVerified | EpisodeFailed) -> None:
    bound = log.bind(run=fact.run, episode=fact.episode, attempt=fact.attempt)
    if isinstance(fact, EpisodeFailed):
        bound.warning("episode failed", reason=fact.reason, detail=fact.detail, sampled_tokens=fact.sampled_tokens)
    else:
        bound.info(
            "trajectory verified",
            reward=fact.reward,
            ended=fact.ended,
            sequences=len(fact.sequences),
            sampled_tokens=fact.sampled_tokens,
            verify_s=round(fact.verify_s, 3),
        )

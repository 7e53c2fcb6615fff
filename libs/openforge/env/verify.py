"""Scores work: a fresh box, the work at /workspace, the checks read-only at /tests, one command.

Promises: nothing that the agent wrote is believed, only run over, and programs of the agent's that the checks
start cannot reach into the checks; where the checks break, the reference shows whose doing it was: if they
pass it on this host, the work broke them and earns nothing, if they do not, there is no verdict.
`SandboxLost` and `JudgeFailed` pass through: they are nobody's verdict.
"""

import asyncio
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from openforge.env.contract import SERVICES_FOLDER, TaskFile, TaskInstance
from openforge.env.judge import ANSWERS, Hearing, Judge
from openforge.env.pack import UnusableWork, cleaned, pack, write_files
from openforge.env.verdict import Asks, Broke, Scored, read_verdict
from openforge.sandbox.contract import PathRefused, Sandbox, SandboxDriver, SandboxLimits, SandboxSpec
from openforge.sandbox.services import ServiceFailed, Services

CHECK_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LC_ALL": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
}
TRANSCRIPT = "transcript.json"
_SCRIPT_TIMEOUT_S = 120.0
_COLLECT_TIMEOUT_S = 30.0
_OUTPUT_CAP_BYTES = 1 << 20
_IN_PLACE_BYTES = 1 << 19
"""Larger tars are cleaned in a thread, so that other verifications go on."""


class CannotVerify(msgspec.Struct, frozen=True):
    """The checks break on the reference too, so nothing can be said about the work."""

    detail: str


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent leaves: `files`, a tar relative to `/`, and `transcript`, the JSON list of its conversation."""

    files: bytes = b""
    transcript: bytes = b"[]"


class Checker:
    """Opens the boxes. `scratch` is a folder of this process for the files of the checks."""

    def __init__(self, driver: SandboxDriver, scratch: Path, labels: Mapping[str, str] | None = None) -> None:
        self.driver = driver
        self.scratch = scratch
        self.labels = labels or {}

    @property
    def isolation(self) -> Literal["full", "reduced"]:
        return self.driver.isolation

    async def verify(
        self,
        instance: TaskInstance,
        work: Work,
        *,
        name: str,
        limits: SandboxLimits | None = None,
        judge: Judge | None = None,
    ) -> Scored | CannotVerify:
        """The verdict on `work`. `limits` are those that it was done under."""
        first = await self.score(instance, work, name=name, limits=limits, judge=judge)
        if isinstance(first, Scored):
            return first
        reference = await self.score_reference(instance, name=f"{name}-ref", judge=judge)
        if not passed(reference, instance):
            return CannotVerify(f"{first.why}; on the reference: {_told(reference)}")
        again = await self.score(instance, work, name=f"{name}-again", limits=limits, judge=judge)
        return again if isinstance(again, Scored) else broken_by_the_work(again)

    async def score(
        self,
        instance: TaskInstance,
        work: Work,
        *,
        name: str,
        limits: SandboxLimits | None = None,
        judge: Judge | None = None,
    ) -> Scored | Broke:
        """What the checks say of `work`, once they have the answers that they ask for."""
        try:
            tar = await _clean(work.files)
        except UnusableWork as error:
            return Broke(why=str(error))
        hearing = Hearing(judge)
        while True:
            said = await self._say(instance, tar, _handed_over(instance, work, hearing), name, limits)
            if not isinstance(said, Asks):
                return said
            await hearing.ask(said.questions)

    async def _say(
        self,
        instance: TaskInstance,
        tar: bytes,
        handed: Mapping[str, TaskFile],
        name: str,
        limits: SandboxLimits | None,
    ) -> Scored | Broke | Asks:
        tests = Path(tempfile.mkdtemp(dir=self.scratch))
        try:
            write_files(tests / "tests", {**instance.tests, **handed})
            return await self._check(instance, tar, tests / "tests", name, at_least(instance.limits, limits))
        finally:
            shutil.rmtree(tests, ignore_errors=True)

    async def score_reference(self, instance: TaskInstance, *, name: str, judge: Judge | None = None) -> Scored | Broke:
        """What the checks say of the reference solution, done as an agent would do it."""
        work = await self.work(instance, instance.reference, name=f"{name}-work")
        return work if isinstance(work, Broke) else await self.score(instance, work, name=name, judge=judge)

    async def work(self, instance: TaskInstance, script: str, *, name: str) -> Work | Broke:
        """What `script` leaves, run by `sh` in the workspace of an agent's box; what it prints is its last word."""
        sandbox = await self.driver.create(self._spec(name, instance.limits))
        services = Services(sandbox, longest_s=_SCRIPT_TIMEOUT_S)
        try:
            await sandbox.put_tar("/workspace", pack(instance.workspace))
            if instance.service_files:
                await sandbox.put_tar(SERVICES_FOLDER, pack(instance.service_files))
            await services.start(instance.services)
            result = await sandbox.exec(("/bin/sh", "-c", script), timeout_s=_SCRIPT_TIMEOUT_S)
            if result.exit_code != 0:
                said = result.stderr.decode(errors="replace").strip()[-200:]
                return Broke(why=f"the script ended with exit code {result.exit_code}: {said}", wall_s=result.wall_s)
            await collect(sandbox, instance)
            files = await sandbox.get_tar(instance.artifacts)
            return Work(files=files, transcript=_monologue(instance.instruction, result.stdout))
        except ServiceFailed as failed:
            return Broke(why=str(failed))
        finally:
            await sandbox.stop()
            await services.stop()

    async def _check(
        self, instance: TaskInstance, tar: bytes, tests: Path, name: str, limits: SandboxLimits
    ) -> Scored | Broke | Asks:
        sandbox = await self.driver.create(self._spec(name, limits, {"/tests": str(tests)}))
        try:
            await sandbox.put_tar("/workspace", tar)
            result = await sandbox.exec(
                instance.verify,
                timeout_s=instance.verify_timeout_s,
                cwd="/",
                env=CHECK_ENV,
                output_cap=_OUTPUT_CAP_BYTES,
                private=True,
            )
        except PathRefused as error:
            return Broke(why=f"the work cannot be unpacked: {error}")
        finally:
            await sandbox.stop()
        return read_verdict(result, instance.reward)

    def _spec(self, name: str, limits: SandboxLimits, binds: Mapping[str, str] | None = None) -> SandboxSpec:
        return SandboxSpec(name=name, limits=limits, network="none", labels=self.labels, binds=binds or {}, ttl_s=600.0)


async def collect(sandbox: Sandbox, instance: TaskInstance) -> None:
    """What the task wants written down before its services end. Where that fails, the checks find it missing."""
    if instance.collect:
        await sandbox.exec(instance.collect, timeout_s=_COLLECT_TIMEOUT_S, cwd="/", output_cap=4096)


def passed(outcome: Scored | Broke, instance: TaskInstance) -> bool:
    return isinstance(outcome, Scored) and outcome.metrics["score"] >= instance.reward.pass_threshold


def broken_by_the_work(broke: Broke) -> Scored:
    """The checks pass the reference but not this work: it broke them, and that earns nothing."""
    return Scored(reward=0.0, metrics={"score": 0.0, "passed": 0.0, "verifier_broke": 1.0}, wall_s=broke.wall_s)


def at_least(limits: SandboxLimits, done_under: SandboxLimits | None) -> SandboxLimits:
    """Room for whatever the agent could leave, and a little more to check it in."""
    if done_under is None:
        return limits
    return SandboxLimits(
        memory_mb=max(limits.memory_mb, done_under.memory_mb) + 64,
        pids=max(limits.pids, done_under.pids),
        disk_mb=max(limits.disk_mb, done_under.disk_mb) + 16,
        cpus=max(limits.cpus, done_under.cpus),
    )


def _handed_over(instance: TaskInstance, work: Work, hearing: Hearing) -> dict[str, TaskFile]:
    """What lies beside the checks."""
    answers = {ANSWERS: TaskFile(content=hearing.file())}
    return answers | ({TRANSCRIPT: TaskFile(content=work.transcript)} if instance.transcript else {})


def _monologue(instruction: str, said: bytes) -> bytes:
    """The conversation of a script."""
    text = said.decode(errors="replace").strip()
    return msgspec.json.encode([{"role": "user", "content": instruction}, {"role": "assistant", "content": text}])


async def _clean(work: bytes) -> bytes:
    return cleaned(work) if len(work) <= _IN_PLACE_BYTES else await asyncio.to_thread(cleaned, work)


def _told(outcome: Scored | Broke) -> str:
    return outcome.why if isinstance(outcome, Broke) else f"reward {outcome.metrics['score']:g}, which is no pass"

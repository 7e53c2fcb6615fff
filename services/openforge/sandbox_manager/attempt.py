"""One attempt, from its sandbox to what the agent left in it.

Promises, in this order: the workspace is there before the agent; what the task collects is collected while its services
are up; the agent's processes are dead before its key is, and its key before its artifacts are read; the sandbox is gone
when this returns, however it returns.
"""

import asyncio
import io
import tarfile
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from openforge.bus import Bus
from openforge.env.contract import SERVICES_FOLDER, CommandAgent, EnvironmentModule, LlmArgs, TaskFile, TaskInstance
from openforge.env.verify import collect
from openforge.protos import BlobRef, EndReason, EpisodeEnded, EpisodeRequested, TurnRecorded
from openforge.runs import RunConfig
from openforge.sandbox.contract import PathRefused, Sandbox, SandboxDriver, SandboxLimits, SandboxLost, SandboxSpec
from openforge.sandbox.pool import Pool
from openforge.sandbox.services import ServiceFailed, Services
from openforge.sandbox_manager.core import Broke, End, Exited, Late, Outcome, Raised, Returned, end_of, redacted
from openforge.sandbox_manager.env_host.keeper import HostKeeper, HostLost, PipelineRaised
from openforge.sandbox_manager.keys import Key, KeyMint
from openforge.sandbox_manager.runs import RunWatch
from openforge.service import cancel, log

PROXY_PORT = 8080
_ARTIFACT_CAP = 64 << 20
_END_GRACE_S = 300.0


class Attempts:
    """What all attempts of a run share."""

    def __init__(
        self,
        bus: Bus,
        driver: SandboxDriver,
        keys: KeyMint,
        hosts: HostKeeper,
        watch: RunWatch,
        config: RunConfig,
        environment: EnvironmentModule,
        labels: Mapping[str, str],
        pool: Pool,
        warm: int = 0,
    ) -> None:
        self.bus = bus
        self.driver = driver
        self.keys = keys
        self.hosts = hosts
        self.watch = watch
        self.config = config
        self.environment = environment
        self.labels = dict(labels)
        self.pool = pool
        self._warm = warm

    async def make_box(self, spec: SandboxSpec) -> Sandbox:
        """One like it is made ahead from the first one on, where spares are wanted."""
        if self._warm:
            self.pool.keep(spec, self._warm)
            self._warm = 0
        return await self.pool.create(spec)


class Attempt:
    def __init__(self, shared: Attempts, request: EpisodeRequested, instance: TaskInstance) -> None:
        self._shared = shared
        self._request = request
        self._instance = instance
        self._began = time.monotonic()
        self._agent_s = 0.0
        self._box: Sandbox | None = None
        self._services: Services | None = None
        self._key: Key | None = None
        self._secret = ""
        self._agent: CommandAgent | None = None
        self._log = log.bind(run=request.run, episode=request.episode, attempt=request.attempt)

    async def prepare(self) -> Sandbox | Broke:
        """A sandbox with the task's files in it, its services up, and a living key; or why there is none."""
        try:
            if self._request.env_kind != "command":
                await self._shared.hosts.ready()  # on nobody's clock: the first attempts would pay for all
            self._key = await self._shared.keys.mint(self._request)
            self._secret = self._key.secret
            self._agent = self._command_agent()
            self._box = await self._shared.make_box(self._spec())
            await self._box.put_tar("/", tar_of(self._files()))
            self._services = Services(self._box, longest_s=self._request.limits.timeout_s + _END_GRACE_S)
            await self._services.start(self._instance.services)
        except HostLost as error:
            return Broke(reason=EndReason.HOST_LOST, text=str(error))
        except (SandboxLost, PathRefused, ServiceFailed) as error:
            return Broke(reason=EndReason.SANDBOX_FAILED, text=str(error))
        except ValueError as error:
            return Broke(reason=EndReason.HARNESS_BROKEN, text=str(error))
        return self._box

    async def work(self) -> Outcome:
        """Let the agent work until it ends, its time is over, or the run is."""
        began = time.monotonic()
        agent = asyncio.create_task(self._run_agent())
        over = asyncio.create_task(self._shared.watch.until_over())
        try:
            await asyncio.wait({agent, over}, return_when=asyncio.FIRST_COMPLETED)
            if not agent.done():
                return Broke(reason=EndReason.CANCELLED, text="the run was stopped")
            return agent.result()
        finally:
            self._agent_s = time.monotonic() - began
            await cancel(agent, over)

    async def end(self, outcome: Outcome) -> EpisodeEnded:
        """Make the agent's end final and say what it was."""
        artifacts: BlobRef | None = None
        try:
            if self._box is not None:
                if not isinstance(outcome, Broke):
                    await collect(self._box, self._instance)
                await self._box.kill_all()
            await self._end_key()
            end = await self._judge(outcome)
            if self._box is not None and end.reason.policy_can_cause:
                artifacts, end = await self._collect(self._box, end)
        except SandboxLost as error:
            await self._end_key()
            end = End(reason=EndReason.SANDBOX_FAILED, detail=str(error))
        await self.clean_up()
        return self._fact(end, artifacts)

    async def clean_up(self) -> None:
        """Whatever happened: no living key, no sandbox. May be called twice."""
        await self._end_key()
        if self._box is not None:
            box, self._box = self._box, None
            try:
                await box.stop()
            except SandboxLost as error:
                self._log.error("sandbox not gone", sandbox=box.id, why=str(error))
        if self._services is not None:
            await self._services.stop()

    async def _end_key(self) -> None:
        if self._key is not None:
            key, self._key = self._key, None
            await key.end()

    async def _judge(self, outcome: Outcome) -> End:
        request = self._request
        turns = await self._shared.bus.count(TurnRecorded, request.run, request.episode, request.attempt)
        return end_of(outcome, turns, request.limits)

    async def _collect(self, box: Sandbox, end: End) -> tuple[BlobRef | None, End]:
        """What the agent left. It may have left more than anybody takes: that is its own doing, and no artifact."""
        try:
            tar = await box.get_tar(self._instance.artifacts, cap=_ARTIFACT_CAP)
        except PathRefused as error:
            return None, msgspec.structs.replace(end, detail=f"{end.detail} artifacts: {error}".strip())
        return await self._shared.bus.blobs.put(tar), end

    def _fact(self, end: End, artifacts: BlobRef | None) -> EpisodeEnded:
        return EpisodeEnded(
            run=self._request.run,
            episode=self._request.episode,
            attempt=self._request.attempt,
            reason=end.reason,
            detail=redacted(end.detail, self._secret),
            artifacts=artifacts,
            claim=end.claim,
            exit_code=end.exit_code,
            agent_s=self._agent_s,
            wall_s=time.monotonic() - self._began,
            log_tail=redacted(end.log_tail, self._secret),
            isolation=self._shared.driver.isolation,
            metrics=end.metrics,
        )

    # -- the agent

    async def _run_agent(self) -> Outcome:
        if self._agent is not None:
            return await self._run_command(self._agent)
        return await self._run_pipeline()

    async def _run_command(self, agent: CommandAgent) -> Outcome:
        assert self._box is not None
        limits = self._request.limits
        try:
            ended = await self._box.exec(agent.argv, timeout_s=limits.timeout_s, cwd=agent.cwd, env=agent.env)
        except SandboxLost as error:
            return Broke(reason=EndReason.SANDBOX_FAILED, text=str(error))
        return Exited(
            exit_code=ended.exit_code,
            timed_out=ended.timed_out,
            out_of_memory=ended.out_of_memory,
            output=ended.stdout[-2048:] + ended.stderr[-2048:],
        )

    async def _run_pipeline(self) -> Outcome:
        assert self._box is not None
        try:
            async with asyncio.timeout(self._request.limits.timeout_s):
                result = await self._shared.hosts.run(
                    self._box,
                    harness=self._request.harness,
                    options=self._options(),
                    instruction=self._instance.instruction,
                    llm_args=self._llm_args(),
                )
        except TimeoutError:
            return Late()
        except HostLost as error:
            return Broke(reason=EndReason.HOST_LOST, text=str(error))
        except PipelineRaised as error:
            return Raised(text=str(error), sandbox_lost=error.sandbox_lost)
        return Returned(result=result)

    def _command_agent(self) -> CommandAgent | None:
        """The program to run in the sandbox; None where an env host runs the agent. Raises `ValueError`."""
        kind, known = self._request.env_kind, self._shared.environment.HARNESSES.get(self._request.harness)
        if kind != known:
            raise ValueError(f"env_kind = {kind!r}: harness {self._request.harness!r} is {known} in this environment")
        if kind != "command":
            return None
        return self._shared.environment.create_command(
            harness=self._request.harness,
            instruction=self._instance.instruction,
            llm_args=self._llm_args(),
            **self._options(),
        )

    def _options(self) -> dict[str, Any]:
        return dict(self._shared.config.environment.options)

    def _llm_args(self) -> LlmArgs:
        sampling = self._shared.config.sampling
        return LlmArgs(
            base_url=f"http://127.0.0.1:{PROXY_PORT}/ep/{self._request.episode}.{self._request.attempt}/v1",
            api_key=self._secret,
            model="policy",
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=sampling.max_tokens,
            stop=sampling.stop,
        )

    def _spec(self) -> SandboxSpec:
        limits = self._request.limits
        return SandboxSpec(
            name=f"{self._request.run}-{self._request.episode}-{self._request.attempt}",
            limits=SandboxLimits(
                memory_mb=limits.memory_mb, pids=limits.pids, disk_mb=limits.disk_mb, cpus=limits.cpus
            ),
            network="proxy-only" if self._agent else "none",
            proxy_port=PROXY_PORT,
            binds=self._agent.binds if self._agent else {},
            labels=self._shared.labels,
            ttl_s=limits.timeout_s + _END_GRACE_S,
        )

    def _files(self) -> dict[str, TaskFile]:
        files = {f"workspace/{path}": file for path, file in self._instance.workspace.items()}
        for path, file in self._instance.service_files.items():
            files[f"{SERVICES_FOLDER.lstrip('/')}/{path}"] = file
        if self._agent is not None:
            files |= {path.lstrip("/"): TaskFile(content=data) for path, data in self._agent.files.items()}
        return files


def tar_of(files: Mapping[str, TaskFile]) -> bytes:
    """The same files give the same bytes."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path, file in sorted(files.items()):
            info = tarfile.TarInfo(path)
            info.size, info.mode = len(file.content), file.mode
            archive.addfile(info, io.BytesIO(file.content))
    return out.getvalue()

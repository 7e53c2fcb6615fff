"""Commands as jobs.

Promises: a command is started once for each wish of a client, however often the wish is repeated: by its
`Idempotency-Key`, or, without one, as long as no answer to it is known to have arrived; its end stays readable for a
day, or until too many or too large ones came after it.
"""

import asyncio
import hashlib
import re
import secrets
import time
from collections.abc import Sequence

import msgspec

from openforge.sandbox.contract import Box, ExecResult, SandboxLost
from openforge.sandbox_manager.api.connection import Delivery
from openforge.sandbox_manager.api.shapes import ExecRequest, JobReply

_DEFAULT_TIMEOUT_S = 300.0
_KEEP_S = 86400.0
_MOST_JOBS = 20_000
_MOST_KEPT_BYTES = 256 << 20
_CERTAIN_S, _PROBABLE_S = 60.0, 10.0
_KEEPS_CONNECTIONS = re.compile(r"python-requests/|aiohttp/")
_TTY_WARNINGS = ("bash: cannot set terminal process group", "bash: no job control in this shell")


class KeyReused(Exception):
    """An `Idempotency-Key` came again with another request."""


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What came with a request for a command. `keeps_connections`: its client closes one only when it failed."""

    key: str
    keeps_connections: bool
    delivery: Delivery


def keeps_connections(agent: str) -> bool:
    return _KEEPS_CONNECTIONS.search(agent) is not None


class Job:
    def __init__(self, sandbox: str, request: ExecRequest, digest: str, key: str, replica: str) -> None:
        self.id = secrets.token_hex(8) + (f"-{replica}" if replica else "")
        self.sandbox = sandbox
        self.request = request
        self.digest = digest
        self.key = key
        self.created_at = time.time()
        self.started_at: float | None = None
        self.completed_at: float | None = None
        self.result: ExecResult | None = None
        self.error: str | None = None
        self.delivery: Delivery | None = None
        self.done = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    @property
    def size(self) -> int:
        return len(self.result.stdout) + len(self.result.stderr) if self.result else 0

    def repeats(self, wish: Wish) -> bool:
        """Whether `wish`, for the same command without a key, asks for this job once more."""
        if self.delivery is None or (self.completed_at and time.time() - self.completed_at > _CERTAIN_S):
            return False
        if self.delivery.certainly_lost:
            return True
        return wish.keeps_connections and self.delivery.probably_lost_within(_PROBABLE_S)

    def reply(self) -> JobReply:
        result = self.result
        status = "queued" if self.started_at is None else "running"
        if self.done.is_set():
            status = "succeeded" if result is not None and result.exit_code == 0 else "failed"
        return JobReply(
            job_id=self.id,
            sandbox_id=self.sandbox,
            command=command_text(self.request),
            status=status,  # type: ignore[arg-type]
            stdout=result.stdout.decode(errors="replace") if result else "",
            stderr=self._stderr(),
            exit_code=result.exit_code if result else None,
            created_at=self.created_at,
            started_at=self.started_at,
            completed_at=self.completed_at,
            error=self.error,
            truncated=result.truncated if result else False,
        )

    def _stderr(self) -> str:
        text = self.result.stderr.decode(errors="replace") if self.result else ""
        if self.request.login_shell:
            text = "".join(line for line in text.splitlines(keepends=True) if not line.startswith(_TTY_WARNINGS))
        return text


class Jobs:
    """Those of all sandboxes of this replica."""

    def __init__(self, *, at_once: int, output_cap: int, replica: str = "") -> None:
        self._places = asyncio.Semaphore(at_once)
        self._output_cap = output_cap
        self._replica = replica
        self._jobs: dict[str, Job] = {}
        self._by_key: dict[tuple[str, str], Job] = {}
        self._last: dict[tuple[str, str], Job] = {}

    def submit(self, sandbox: str, box: Box, request: ExecRequest, wish: Wish) -> Job:
        """The job for this wish, begun if it is a new one; raises `KeyReused`."""
        digest = digest_of(request)
        job = self._known(sandbox, digest, wish)
        if job is None:
            job = Job(sandbox, request, digest, wish.key, self._replica)
            self._jobs[job.id] = job
            self._last[sandbox, digest] = job
            if wish.key:
                self._by_key[sandbox, wish.key] = job
            job.task = asyncio.create_task(self._run(job, box))
        job.delivery = wish.delivery
        return job

    def find(self, job_id: str) -> Job | None:
        return self._jobs.get(job_id)

    def forget_old(self) -> None:
        """Of the finished ones, the oldest first."""
        kept = sum(job.size for job in self._jobs.values())
        for job in [job for job in self._jobs.values() if job.done.is_set()]:
            old = time.time() - job.created_at > _KEEP_S
            if not old and len(self._jobs) <= _MOST_JOBS and kept <= _MOST_KEPT_BYTES:
                return
            kept -= job.size
            self._forget(job)

    async def close(self) -> None:
        for job in self._jobs.values():
            if job.task is not None:
                job.task.cancel()

    def _forget(self, job: Job) -> None:
        del self._jobs[job.id]
        if self._last.get((job.sandbox, job.digest)) is job:
            del self._last[job.sandbox, job.digest]
        self._by_key.pop((job.sandbox, job.key), None)

    def _known(self, sandbox: str, digest: str, wish: Wish) -> Job | None:
        if wish.key:
            job = self._by_key.get((sandbox, wish.key))
            if job is not None and job.digest != digest:
                raise KeyReused(f"Idempotency-Key = {wish.key!r} came with another command before: use a new key")
            return job
        job = self._last.get((sandbox, digest))
        return job if job is not None and job.repeats(wish) else None

    async def _run(self, job: Job, box: Box) -> None:
        request = job.request
        timeout_s = request.timeout_seconds or _DEFAULT_TIMEOUT_S
        try:
            async with self._places:
                job.started_at = time.time()
                job.result = await box.exec(
                    argv_of(request),
                    timeout_s=timeout_s,
                    env=request.env,
                    stdin=request.stdin.encode("utf-8", "surrogatepass"),
                    output_cap=min(request.output_cap or self._output_cap, self._output_cap),
                )
            if job.result.timed_out:
                job.error = f"Command timed out after {timeout_s:g}s"
            elif job.result.out_of_memory:
                job.error = "Out of memory"
        except SandboxLost as lost:
            job.error = f"Sandbox lost: {lost}"
        except ValueError as wrong:
            job.error = str(wrong)
        except asyncio.CancelledError:
            job.error = "Cancelled"
            raise
        finally:
            job.completed_at = time.time()
            job.done.set()


def command_text(request: ExecRequest) -> str:
    """Parts of a list are joined and not quoted: that is what clients of this API count on."""
    return request.command if isinstance(request.command, str) else " ".join(request.command)


def argv_of(request: ExecRequest) -> Sequence[str]:
    shell = ["/bin/bash", "-lic" if request.login_shell else "-c"]
    script = command_text(request)
    if request.login_shell:
        script = f"[ -f ~/.bashrc ] && . ~/.bashrc\n{script}"
    if request.cwd is None:
        return [*shell, script]
    return ["/bin/sh", "-c", 'cd -- "$1" 2>/dev/null || cd /; shift; exec "$@"', "-", request.cwd, *shell, script]


def digest_of(request: ExecRequest) -> str:
    """Of all that says what is to be run; whether the client waits is not part of it."""
    return hashlib.sha256(request.model_dump_json(exclude={"wait"}).encode("utf-8", "surrogatepass")).hexdigest()

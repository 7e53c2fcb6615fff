"""Episodes: one harness at one task. An attempt is one try of an episode's slot."""

from typing import ClassVar, Literal

import msgspec

from openforge.protos.fact import BlobRef, Fact
from openforge.protos.group import Purpose, TaskRef
from openforge.protos.reasons import EndReason, FailReason

Isolation = Literal["full", "reduced"]


class EpisodeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one attempt may use. `timeout_s` is the agent's wall clock, `turns` its model calls."""

    timeout_s: float
    turns: int
    tokens_per_turn: int
    memory_mb: int = 512
    pids: int = 128
    disk_mb: int = 64
    cpus: float = 1.0


class EpisodeRequested(Fact, frozen=True, kw_only=True, tag=True):
    """The scheduler wants attempt `attempt` of slot `episode`. It alone opens attempts.

    `env_kind` says where the harness runs: `command` inside the sandbox, `pipeline` in an env
    host, `direct` in our own loop.
    """

    kind: ClassVar[str] = "episode"
    name: ClassVar[str] = "requested"
    key_length: ClassVar[int] = 2

    episode: str
    attempt: int
    group: str
    purpose: Purpose
    task: TaskRef
    harness: str
    env_kind: Literal["command", "pipeline", "direct"]
    limits: EpisodeLimits
    seed: int

    def key(self) -> tuple[str | int, ...]:
        return (self.episode, self.attempt)


class EpisodeStarted(Fact, frozen=True, kw_only=True, tag=True):
    """The attempt has a sandbox and a model key; the agent begins."""

    kind: ClassVar[str] = "episode"
    name: ClassVar[str] = "started"
    key_length: ClassVar[int] = 2

    episode: str
    attempt: int
    manager: str
    sandbox: str
    isolation: Isolation

    def key(self) -> tuple[str | int, ...]:
        return (self.episode, self.attempt)


class EpisodeEnded(Fact, frozen=True, kw_only=True, tag=True):
    """The agent is gone, its key is dead, its sandbox is gone; what it left is in `artifacts`.

    `artifacts` is a tar of the declared paths. `claim` is a reward that only the environment
    itself states; `log_tail` the last output of the harness, for people; `metrics` what the environment counted.
    """

    kind: ClassVar[str] = "episode"
    name: ClassVar[str] = "ended"
    key_length: ClassVar[int] = 2

    episode: str
    attempt: int
    reason: EndReason
    detail: str = ""
    artifacts: BlobRef | None = None
    claim: float | None = None
    exit_code: int | None = None
    agent_s: float = 0.0
    wall_s: float = 0.0
    log_tail: str = ""
    isolation: Isolation = "full"
    metrics: dict[str, float] = {}

    def key(self) -> tuple[str | int, ...]:
        return (self.episode, self.attempt)


class EpisodeSealed(Fact, frozen=True, kw_only=True, tag=True):
    """The proxy takes no more calls of the attempt, and `turns` are all that it recorded.

    `refused` counts the calls that came after the end; `engine_failures` the calls whose answer the
    harness never got for a reason of ours, `malformed` those that could not be read, `unanswered` those that were
    called off before the engine had sampled a token. `orphaned` are turns whose answer came to a harness that was no
    longer there, or of which a proxy that died knew what became.
    """

    kind: ClassVar[str] = "episode"
    name: ClassVar[str] = "sealed"
    key_length: ClassVar[int] = 2

    episode: str
    attempt: int
    turns: tuple[int, ...]
    refused: int = 0
    engine_failures: int = 0
    malformed: int = 0
    orphaned: tuple[int, ...] = ()
    unanswered: int = 0

    def key(self) -> tuple[str | int, ...]:
        return (self.episode, self.attempt)


class EpisodeFailed(Fact, frozen=True, kw_only=True, tag=True):
    """The attempt has no verdict, for a reason that the policy cannot cause."""

    kind: ClassVar[str] = "episode"
    name: ClassVar[str] = "failed"
    key_length: ClassVar[int] = 2

    episode: str
    attempt: int
    reason: FailReason
    detail: str = ""
    sampled_tokens: int = 0

    def key(self) -> tuple[str | int, ...]:
        return (self.episode, self.attempt)

"""What clients say of a run: that it should work, rest or end."""

from typing import ClassVar

from openforge.protos.fact import Fact
from openforge.protos.reasons import StopReason


class RunSubmitted(Fact, frozen=True, kw_only=True, tag=True):
    """The run should work. `generation` 0 starts it, each later one resumes it.

    `config` is the validated run file as canonical JSON; `config_digest` its sha256 in hex.
    """

    kind: ClassVar[str] = "run"
    name: ClassVar[str] = "submitted"

    generation: int
    config: str
    config_digest: str
    openforge_version: str = ""

    def key(self) -> tuple[str | int, ...]:
        return (self.generation,)


class RunPaused(Fact, frozen=True, kw_only=True, tag=True):
    """No new work until the next `RunSubmitted`; work in flight goes on."""

    kind: ClassVar[str] = "run"
    name: ClassVar[str] = "paused"

    generation: int

    def key(self) -> tuple[str | int, ...]:
        return (self.generation,)


class RunStopped(Fact, frozen=True, kw_only=True, tag=True):
    """Generation `generation` of the run is over."""

    kind: ClassVar[str] = "run"
    name: ClassVar[str] = "stopped"

    generation: int
    reason: StopReason
    detail: str = ""

    def key(self) -> tuple[str | int, ...]:
        return (self.generation,)

"""Whether a run works, rests or is over: a fold of its own facts.

Promises: facts of older generations change nothing, in whatever order they arrive.
"""

from collections.abc import Iterable
from typing import Literal

import msgspec

from openforge.protos import Fact, RunPaused, RunStopped, RunSubmitted, StopReason


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """What the run's own facts say of it; `generation` -1 where there are none."""

    phase: Literal["absent", "submitted", "paused", "stopped"] = "absent"
    generation: int = -1
    config: str = ""
    config_digest: str = ""
    reason: StopReason | None = None
    detail: str = ""

    def after(self, fact: Fact) -> "RunState":
        """The state after one more fact; facts of older generations change nothing."""
        match fact:
            case RunSubmitted() if fact.generation > self.generation:
                return RunState(
                    phase="submitted",
                    generation=fact.generation,
                    config=fact.config,
                    config_digest=fact.config_digest,
                )
            case RunPaused() if fact.generation >= self.generation and self.phase != "stopped":
                return msgspec.structs.replace(self, phase="paused", generation=fact.generation)
            case RunStopped() if fact.generation >= self.generation:
                return msgspec.structs.replace(
                    self, phase="stopped", generation=fact.generation, reason=fact.reason, detail=fact.detail
                )
            case _:
                return self


def run_state(facts: Iterable[Fact]) -> RunState:
    """Fold the facts of one run, of which only those of kind `run` matter."""
    state = RunState()
    for fact in facts:
        state = state.after(fact)
    return state

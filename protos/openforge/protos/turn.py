"""Turns: one model call of an attempt, token for token."""

from typing import ClassVar

import msgspec

from openforge.protos.arrays import count
from openforge.protos.fact import BlobRef, Fact, Span, VersionSpan
from openforge.protos.reasons import BranchCause, Caller, FinishReason, TurnStatus


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling parameters that the engine used: the run's, not the harness's."""

    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 0
    stop: tuple[str, ...] = ()
    seed: int | None = None


class HarnessIdentity(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the harness says of itself. Hints within an attempt's own key, never authority.

    `window` changes when a thread's history is replaced. `purpose` is what the call is for, `compaction` for one.
    """

    user_agent: str = ""
    session: str = ""
    thread: str = ""
    parent_thread: str = ""
    sub_agent: str = ""
    window: str = ""
    purpose: str = ""


class EngineIdentity(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    engine: str
    model: str = ""
    request: str = ""


class Usage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens as an endpoint counts them; None where it does not say."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None


class Timing(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Seconds. `received_at` is Unix time, the others are durations since then."""

    received_at: float
    first_token_s: float = 0.0
    sampled_s: float = 0.0
    recorded_s: float = 0.0


class TurnRecorded(Fact, frozen=True, kw_only=True, tag=True):
    """One model call: only what its parent turn does not hold.

    The prompt is the first `prefix` tokens of the parent's prompt-and-answer, then `suffix`.
    `sampled` are the engine's own ids with their `logprobs` (processed: of the distribution that
    was sampled from). `guided`: that is what a grammar or a schema left of the policy's own.
    `versions` and `forced` (tokens a guide dictated) count from the first sampled token. `messages` is
    the JSON list of messages that the parent does not have, `reply` the JSON message the harness was
    told, `asked` the JSON of the sampling fields it sent. `tools` is the JSON tool list, empty where it
    is the parent's. The conversation that was sent is the first `kept` messages of
    the parent's (its reply included), then `messages`; messages are `openforge.chat` Messages. `read` are earlier turns
    whose answers were read to their end, as far as no turn before says so and none goes on from them. Where there is
    `usage`, an endpoint that we do not serve has answered: nobody knows ids, log-probs and versions, so they are empty,
    and `usage` is what it says of itself. `routed_experts` is what a mixture of experts chose for the tokens of prompt
    and answer from `routed_from` on, the last one, which was not computed, left out: an .npy file of unsigned integers
    (tokens, layers, experts per token).
    """

    kind: ClassVar[str] = "turn"
    name: ClassVar[str] = ""
    key_length: ClassVar[int] = 3
    seams: ClassVar[tuple[str, ...]] = ("logprobs", "versions")

    episode: str
    attempt: int
    turn: int
    parent: int | None
    cause: BranchCause
    prefix: int
    suffix: bytes
    sampled: bytes
    logprobs: bytes
    versions: tuple[VersionSpan, ...]
    forced: tuple[Span, ...] = ()
    finish: FinishReason
    status: TurnStatus
    sampling: Sampling
    asked: bytes = b""
    kept: int = 0
    messages: bytes = b""
    reply: bytes = b""
    tools: bytes = b""
    dialect: str = "chat"
    digest: str = ""
    harness: HarnessIdentity = HarnessIdentity()
    engine: EngineIdentity
    timing: Timing
    images: tuple[str, ...] = ()
    routed_experts: BlobRef | None = None
    caller: Caller = Caller.MAIN
    guided: bool = False
    read: tuple[int, ...] = ()
    usage: Usage | None = None
    routed_from: int = 0

    def sampled_tokens(self) -> int:
        return self.usage.completion_tokens if self.usage is not None else count(self.sampled)

    def key(self) -> tuple[str | int, ...]:
        return (self.episode, self.attempt, self.turn)

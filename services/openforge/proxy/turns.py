"""What is known of calls: recorded turns, questions that compare, and where a call is placed."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from openforge.chat.canonical import Chain
from openforge.chat.contract import Message, Tool
from openforge.protos import BranchCause, Caller, FinishReason, HarnessIdentity, TurnStatus, Usage, VersionSpan

ID_BYTES = 4


@dataclass(slots=True)
class Turn:
    """A recorded turn. `steps` are the chain values after each message it adds, its reply the last.

    `received`: its answer was written to a harness that was still there; None where that is not known. `followed`:
    a later call of the same caller went on from it and was answered. `calls` are the ids of the conversation's tool
    calls. `ids` is None where turn `continued_by` begins with them. `cached_tokens` of its prompt the engine had
    computed before; None where that is not known. `usage` is what an endpoint counted that tells no ids.
    """

    number: int
    cause: BranchCause
    parent: int | None
    prefix: int
    kept: int
    prompt_tokens: int
    length: int
    steps: tuple[bytes, ...]
    tools: bytes
    thread: str
    digest: str
    request: str
    status: TurnStatus
    finish: FinishReason
    reply: Message
    ids: bytes | None
    calls: tuple[str, ...] = ()
    caller: Caller = Caller.MAIN
    continued_by: int | None = None
    received: bool | None = None
    followed: bool = False
    cached_tokens: int | None = None
    usage: Usage | None = None

    @property
    def sampled_tokens(self) -> int:
        return self.length - self.prompt_tokens


class Question(msgspec.Struct, frozen=True):
    """One call as it compares with others: canonical messages, tools, who asks, and the digest of it all.

    `steps` are the chain's values after each message, `bare_steps` those that leave out reasoning.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    tools_digest: bytes
    digest: str
    chain: Chain
    steps: tuple[bytes, ...]
    bare_steps: tuple[bytes, ...]
    harness: HarnessIdentity


def steps_of(
    messages: Sequence[Message], known: Question | None = None
) -> tuple[Chain, tuple[bytes, ...], tuple[bytes, ...]]:
    """The chain after all messages, and its values after each; what an earlier question begins with comes from it."""
    at = in_common(messages, known.messages) if known else 0
    steps = list(known.steps[:at]) if known else []
    bare = list(known.bare_steps[:at]) if known else []
    if known and at == len(known.messages):
        chain = known.chain.copy()
    else:
        chain = Chain.after(messages[:at], steps[-1], bare[-1]) if at else Chain()
    for message in messages[at:]:
        chain.add(message)
        steps.append(chain.value)
        bare.append(chain.bare)
    return chain, tuple(steps), tuple(bare)


def in_common(one: Sequence[Message], other: Sequence[Message]) -> int:
    """How many messages both begin with."""
    for at, (ours, theirs) in enumerate(zip(one, other, strict=False)):
        if ours != theirs:
            return at
    return min(len(one), len(other))


class Placement(msgspec.Struct, frozen=True):
    """Where a call belongs: its prompt is the first `prefix` tokens of turn `parent`, then `suffix`."""

    question: Question
    cause: BranchCause
    parent: int | None
    prefix: int
    kept: int
    prompt: bytes
    tools: bytes
    same_tools: bool
    caller: Caller = Caller.MAIN

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt) // ID_BYTES

    @property
    def suffix(self) -> bytes:
        return self.prompt[self.prefix * ID_BYTES :]


@dataclass(slots=True)
class Sampled:
    """What the engine answered, so far or at all. `stop` is the stop string that ended it.

    `said` is the whole answer of an endpoint that tells no ids, `usage` what it counted. `routed` is what the engine
    said of its experts, as it came.
    """

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: tuple[VersionSpan, ...] = ()
    finish: FinishReason = FinishReason.ABORT
    stop: str = ""
    cached_tokens: int | None = None
    said: Message | None = None
    usage: Usage | None = None
    routed: str = ""

    @property
    def begun(self) -> bool:
        """Whether there is anything of an answer."""
        return bool(self.ids) or self.said is not None


@dataclass(slots=True)
class OpenCall:
    """A call that is not recorded yet, as far as other calls are concerned."""

    digest: str
    placement: Placement | None = None
    listeners: int = 0
    given_up: bool = False


class Standing(msgspec.Struct, frozen=True):
    """How a call stands to the record.

    It goes on from turn `parent`, of the same tools, with what comes after its first `at` messages; `fresh`: no
    assistant message is among these. Its first `known` messages end with a recorded answer, whatever the tools.
    """

    parent: Turn | None
    at: int
    known: int
    fresh: bool


@dataclass(slots=True, frozen=True)
class Join:
    """The same sample answers: wait for `call`."""

    call: OpenCall


@dataclass(slots=True, frozen=True)
class Replay:
    """The same sample answers: it is recorded as `turn`."""

    turn: Turn


@dataclass(slots=True, frozen=True)
class Fresh:
    """A sample of its own."""

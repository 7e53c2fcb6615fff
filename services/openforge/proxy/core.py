"""The turns of one attempt as a tree, and where the next call belongs in it.

Promises: where the harness's history extends what it was sent and told, the next prompt begins with the very ids
that were recorded; everything else is a branch with a cause; the same facts give the same tree after a restart.
No clock, socket or await in here.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from openforge.chat.canonical import Chain, tools_digest
from openforge.chat.contract import Message, Renderer, Tool, ToolCall
from openforge.chat.decoding import cut_at_stop
from openforge.protos import (
    BranchCause,
    EngineIdentity,
    FinishReason,
    HarnessIdentity,
    Sampling,
    Timing,
    TurnRecorded,
    TurnStatus,
    VersionSpan,
    pack_ids,
    pack_logprobs,
)
from openforge.tokens import rebuild

_ID_BYTES = 4
_MESSAGES = msgspec.json.Decoder(tuple[Message, ...])
_MESSAGE = msgspec.json.Decoder(Message)
_TOOLS = msgspec.json.Decoder(tuple[Tool, ...])


class PromptTooLong(ValueError):
    """The prompt leaves no room for an answer."""

    def __init__(self, prompt_tokens: int, window: int) -> None:
        super().__init__(f"the prompt has {prompt_tokens} tokens, which fill the window of {window}")
        self.prompt_tokens = prompt_tokens
        self.window = window


@dataclass(slots=True)
class Turn:
    """A recorded turn. `steps` are the chain values after each message it adds, its reply the last.

    `received`: its answer was written to a harness that was still there. `ids` is None where turn `continued_by`
    begins with them.
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
    continued_by: int | None = None
    received: bool = False

    @property
    def sampled_tokens(self) -> int:
        return self.length - self.prompt_tokens


@dataclass(slots=True, frozen=True)
class Question:
    """One call as it compares with others: canonical messages, tools, who asks, and the digest of it all."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    digest: str
    chain: Chain
    steps: tuple[bytes, ...]
    bare_steps: tuple[bytes, ...]
    harness: HarnessIdentity


def steps_of(messages: Iterable[Message]) -> tuple[Chain, tuple[bytes, ...], tuple[bytes, ...]]:
    """The chain after all messages, and its values after each."""
    chain = Chain()
    steps: list[bytes] = []
    bare: list[bytes] = []
    for message in messages:
        chain.add(message)
        steps.append(chain.value)
        bare.append(chain.bare)
    return chain, tuple(steps), tuple(bare)


@dataclass(slots=True, frozen=True)
class Placement:
    """Where a call belongs: its prompt is the first `prefix` tokens of turn `parent`, then `suffix`."""

    question: Question
    cause: BranchCause
    parent: int | None
    prefix: int
    kept: int
    prompt: bytes
    tools: bytes
    same_tools: bool

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt) // _ID_BYTES

    @property
    def suffix(self) -> bytes:
        return self.prompt[self.prefix * _ID_BYTES :]

    def prompt_ids(self) -> list[int]:
        return view(self.prompt).tolist()


@dataclass(slots=True)
class Sampled:
    """What the engine answered, so far or at all. `stop` is the stop string that ended it."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: tuple[VersionSpan, ...] = ()
    finish: FinishReason = FinishReason.ABORT
    stop: str = ""


@dataclass(slots=True)
class OpenCall:
    """A call that is not recorded yet, as far as repeats are concerned."""

    digest: str
    listeners: int = 0
    given_up: bool = False


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


class Attempt:
    """All that the proxy knows of one attempt's conversation."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self.turns: list[Turn] = []
        self.open: list[OpenCall] = []
        self._after: dict[bytes, list[Turn]] = {}
        self._after_bare: dict[bytes, list[Turn]] = {}
        self._firsts: set[bytes] = set()
        self._by_digest: dict[str, Turn] = {}

    def admit(self, digest: str, retry: bool) -> Join | Replay | Fresh:
        """Whether a call repeats one whose answer the harness does not have. `retry`: it says so itself."""
        for call in self.open:
            if call.digest == digest and not call.given_up and (retry or call.listeners == 0):
                return Join(call)
        turn = self._by_digest.get(digest)
        if turn is None or turn.status is not TurnStatus.DELIVERED or turn.continued_by is not None:
            return Fresh()
        return Replay(turn) if retry or not turn.received else Fresh()

    def place(self, question: Question) -> Placement:
        """Where a fresh call belongs."""
        earlier = self._by_digest.get(question.digest)
        if earlier is not None:
            return self._again(question, earlier)
        tools = tools_digest(question.tools)
        known, at = self._deepest(question.steps, self._after)
        if known is None:
            return self._branch(question, tools, self._why(question, tools))
        parent = max((turn for turn in known if turn.tools == tools), key=_likeliest, default=None)
        if parent is None:
            return self._branch(question, tools, BranchCause.TOOLS_CHANGED)
        ids = self.ids(parent)
        bridge = self._renderer.bridge(view(ids), question.messages[at:], question.tools)
        if bridge is None:
            return self._branch(question, tools, BranchCause.TEMPLATE)
        return Placement(
            question=question,
            cause=BranchCause.CONTINUED,
            parent=parent.number,
            prefix=parent.length,
            kept=at,
            prompt=ids + pack_ids(bridge),
            tools=tools,
            same_tools=True,
        )

    def ids(self, turn: Turn) -> bytes:
        """Prompt and answer of a turn, packed."""
        holder = turn
        while holder.ids is None:
            assert holder.continued_by is not None, "a turn without ids is continued by one that has them"
            holder = self.turns[holder.continued_by]
        return holder.ids[: turn.length * _ID_BYTES]

    def add(self, fact: TurnRecorded, placement: Placement, reply: Message) -> Turn:
        """The turn that `fact` told."""
        chain = placement.question.chain.copy()
        chain.add(reply)
        turn = Turn(
            number=fact.turn,
            cause=fact.cause,
            parent=fact.parent,
            prefix=fact.prefix,
            kept=fact.kept,
            prompt_tokens=placement.prompt_tokens,
            length=placement.prompt_tokens + len(fact.sampled) // _ID_BYTES,
            steps=(*placement.question.steps[fact.kept :], chain.value),
            tools=placement.tools,
            thread=fact.harness.thread,
            digest=fact.digest,
            request=fact.engine.request,
            status=fact.status,
            finish=fact.finish,
            reply=reply,
            ids=placement.prompt + fact.sampled,
        )
        self._index(turn, chain, placement.question.steps[0])
        return turn

    def restore(self, facts: Sequence[TurnRecorded]) -> None:
        """The tree as it was, from all the turns that were told, in any order.

        Whether an answer reached the harness is known only where the harness went on from it.
        """
        conversations: dict[int, tuple[Message, ...]] = {}
        tools: dict[int, tuple[Tool, ...]] = {}
        for rebuilt in rebuild(facts):
            fact = rebuilt.fact
            earlier = conversations[fact.parent] if fact.parent is not None else ()
            messages = (*earlier[: fact.kept], *_MESSAGES.decode(fact.messages or b"[]"))
            inherited = tools[fact.parent] if fact.parent is not None else ()
            tools[fact.turn] = _TOOLS.decode(fact.tools) if fact.tools else inherited
            reply = _MESSAGE.decode(fact.reply)
            conversations[fact.turn] = (*messages, reply)
            question = self.question(messages, tools[fact.turn], fact.digest, fact.harness)
            placement = Placement(
                question=question,
                cause=fact.cause,
                parent=fact.parent,
                prefix=fact.prefix,
                kept=fact.kept,
                prompt=rebuilt.prompt,
                tools=tools_digest(tools[fact.turn]),
                same_tools=not fact.tools,
            )
            self.add(fact, placement, reply)

    @staticmethod
    def question(
        messages: tuple[Message, ...], tools: tuple[Tool, ...], digest: str, harness: HarnessIdentity
    ) -> Question:
        chain, steps, bare = steps_of(messages)
        return Question(messages, tools, digest, chain, steps, bare, harness)

    def _index(self, turn: Turn, after: Chain, first: bytes) -> None:
        self.turns.append(turn)
        self._after.setdefault(after.value, []).append(turn)
        self._after_bare.setdefault(after.bare, []).append(turn)
        self._firsts.add(first)
        self._by_digest[turn.digest] = turn
        if turn.parent is not None and turn.prefix == self.turns[turn.parent].length:
            parent = self.turns[turn.parent]
            parent.continued_by, parent.ids, parent.received = turn.number, None, True

    def _again(self, question: Question, earlier: Turn) -> Placement:
        """The same question as `earlier`: the same prompt, whatever was recorded meanwhile."""
        resampled = earlier.status is TurnStatus.DELIVERED
        return Placement(
            question=question,
            cause=BranchCause.RESAMPLED if resampled else earlier.cause,
            parent=earlier.number if resampled else earlier.parent,
            prefix=earlier.prompt_tokens if resampled else earlier.prefix,
            kept=len(question.messages) if resampled else earlier.kept,
            prompt=self.ids(earlier)[: earlier.prompt_tokens * _ID_BYTES],
            tools=earlier.tools,
            same_tools=resampled or (earlier.parent is not None and self.turns[earlier.parent].tools == earlier.tools),
        )

    def _branch(self, question: Question, tools: bytes, cause: BranchCause) -> Placement:
        prompt = pack_ids(self._renderer.render(question.messages, question.tools))
        parent, prefix = self._nearest(prompt)
        return Placement(
            question=question,
            cause=cause,
            parent=parent.number if parent else None,
            prefix=prefix,
            kept=self._kept(parent, question.steps) if parent else 0,
            prompt=prompt,
            tools=tools,
            same_tools=parent.tools == tools if parent else not tools,
        )

    def _deepest(self, steps: Sequence[bytes], after: dict[bytes, list[Turn]]) -> tuple[list[Turn] | None, int]:
        """The recorded turns after which the longest part of the conversation stands, and how long that is."""
        for at in range(len(steps), 0, -1):
            if steps[at - 1] in after:
                return after[steps[at - 1]], at
        return None, 0

    def _nearest(self, prompt: bytes) -> tuple[Turn | None, int]:
        """The turn that shares the longest beginning with the prompt; the earliest one that has it all."""
        best: Turn | None = None
        longest = 0
        for turn in self.turns:
            if turn.ids is not None and (shared := shared_ids(turn.ids, prompt)) > longest:
                best, longest = turn, shared
        while best is not None and best.parent is not None and longest <= best.prefix:
            best = self.turns[best.parent]
        return best, longest

    def _kept(self, parent: Turn, steps: Sequence[bytes]) -> int:
        """How many messages the conversation has in common with that of `parent`."""
        common = 0
        for ours, theirs in zip(steps, self._conversation(parent), strict=False):
            if ours != theirs:
                break
            common += 1
        return common

    def _conversation(self, turn: Turn) -> Iterator[bytes]:
        earlier: tuple[bytes, ...] = ()
        if turn.parent is not None and turn.kept:
            earlier = tuple(self._conversation(self.turns[turn.parent]))[: turn.kept]
        yield from earlier
        yield from turn.steps

    def _why(self, question: Question, tools: bytes) -> BranchCause:
        """Why a call continues nothing, as far as its shape and the harness's own hints tell."""
        if not self.turns:
            return BranchCause.START
        if self._deepest(question.bare_steps, self._after_bare)[0] is not None:
            return BranchCause.REASONING_DROPPED
        threads = {turn.thread for turn in self.turns}
        if question.harness.sub_agent or (question.harness.thread and question.harness.thread not in threads):
            return BranchCause.SUB_AGENT
        if question.steps[0] in self._firsts:
            longest = max(turn.kept + len(turn.steps) for turn in self.turns)
            return BranchCause.COMPACTION if len(question.messages) < longest - 1 else BranchCause.REWRITTEN
        fresh = all(message.role != "assistant" for message in question.messages)
        return BranchCause.SIDE_CALL if fresh else BranchCause.REWRITTEN


def _likeliest(turn: Turn) -> tuple[bool, int]:
    """Among turns with equal histories and answers: one that was delivered, and the newest of these."""
    return turn.status is TurnStatus.DELIVERED, turn.number


def view(ids: bytes) -> "memoryview[int]":
    """Packed ids as a sequence of numbers, not copied (little-endian machines only, as torch is)."""
    return memoryview(ids).cast("i")


def shared_ids(one: bytes, other: bytes) -> int:
    """How many ids two packed arrays have in common at their beginning."""
    low, high = 0, min(len(one), len(other)) // _ID_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        same = one[low * _ID_BYTES : middle * _ID_BYTES] == other[low * _ID_BYTES : middle * _ID_BYTES]
        low, high = (middle, high) if same else (low, middle - 1)
    return low


def room(prompt_tokens: int, window: int, limits: Iterable[int | None]) -> int:
    """How many tokens may be sampled: the least of the limits, and what the window leaves."""
    left = window - prompt_tokens
    if left < 1:
        raise PromptTooLong(prompt_tokens, window)
    return min([left, *(limit for limit in limits if limit is not None)])


def reply_of(renderer: Renderer, sampled: Sampled, tools: Sequence[Tool], call_id: str) -> Message:
    """The message that the harness is told; its tool calls carry ids that begin with `call_id`."""
    parsed = renderer.parse(sampled.ids, tools)
    content = cut_at_stop(parsed.content, [sampled.stop]) if sampled.stop else parsed.content
    calls = tuple(
        ToolCall(id=f"{call_id}{index}", name=call.name, arguments=call.arguments)
        for index, call in enumerate(parsed.tool_calls)
    )
    return Message(role="assistant", content=content, reasoning=parsed.reasoning, tool_calls=calls)


@dataclass(slots=True, frozen=True)
class Asked:
    """What a record says of the call beside its tokens."""

    sampling: Sampling
    asked: bytes
    dialect: str
    engine: EngineIdentity


def turn_fact(
    run: str,
    episode: str,
    attempt: int,
    number: int,
    placement: Placement,
    sampled: Sampled,
    reply: Message,
    asked: Asked,
    status: TurnStatus,
    timing: Timing,
) -> TurnRecorded:
    """The record of a call: only what its parent does not hold."""
    question = placement.question
    return TurnRecorded(
        run=run,
        episode=episode,
        attempt=attempt,
        turn=number,
        parent=placement.parent,
        cause=placement.cause,
        prefix=placement.prefix,
        suffix=placement.suffix,
        sampled=pack_ids(sampled.ids),
        logprobs=pack_logprobs(sampled.logprobs),
        versions=sampled.versions,
        finish=sampled.finish,
        status=status,
        sampling=asked.sampling,
        asked=asked.asked,
        kept=placement.kept,
        messages=msgspec.json.encode(question.messages[placement.kept :]),
        reply=msgspec.json.encode(reply),
        tools=b"" if placement.same_tools else msgspec.json.encode(question.tools),
        dialect=asked.dialect,
        digest=question.digest,
        harness=question.harness,
        engine=asked.engine,
        timing=timing,
    )

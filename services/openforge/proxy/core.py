"""The turns of one attempt as a tree, and where the next call belongs in it.

Promises: where the harness's history extends what it was sent and told, the next prompt begins with the very ids
that were recorded; everything else is a branch with a cause; the same facts give the same tree after a restart.
No clock, socket or await in here.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from openforge.chat.canonical import Chain, answer_key, call_ids, chain_of, tools_digest
from openforge.chat.contract import Message, Renderer, Tool
from openforge.protos import (
    BranchCause,
    Caller,
    HarnessIdentity,
    TurnRecorded,
    TurnStatus,
    common_length,
)
from openforge.proxy.causes import History
from openforge.proxy.prompts import Script, Written, joined, view, written
from openforge.proxy.turns import (
    ID_BYTES,
    Fresh,
    Join,
    OpenCall,
    Placement,
    Question,
    Replay,
    Sampled,
    Standing,
    Turn,
    in_common,
    steps_of,
)
from openforge.tokens import rebuild

__all__ = [
    "Attempt",
    "Fresh",
    "Join",
    "OpenCall",
    "Placement",
    "PromptTooLong",
    "Question",
    "Replay",
    "Sampled",
    "Turn",
    "room",
    "view",
]

_MESSAGES = msgspec.json.Decoder(tuple[Message, ...])
_MESSAGE = msgspec.json.Decoder(Message)
_TOOLS = msgspec.json.Decoder(tuple[Tool, ...])


class Made(NamedTuple):
    """A turn that is not in the tree yet, the chain `after` its reply, and its ids as `written`."""

    turn: Turn
    after: Chain
    question: Question
    written: bytes


class PromptTooLong(ValueError):
    """The prompt leaves no room for an answer."""

    def __init__(self, prompt_tokens: int, window: int) -> None:
        super().__init__(f"the prompt has {prompt_tokens} tokens, which fill the window of {window}")
        self.prompt_tokens = prompt_tokens
        self.window = window


class Attempt:
    """All that the proxy knows of one attempt's conversations."""

    def __init__(self, renderer: Renderer) -> None:
        self._script = Script(renderer, self._sampled_answer)
        self.turns: list[Turn] = []
        self.open: list[OpenCall] = []
        self._written = Written()
        self._asked: Question | None = None
        self._history = History()
        self._after: dict[bytes, list[Turn]] = {}
        self._answers: dict[bytes, Turn] = {}
        self._questions: dict[tuple[bytes, bytes, str], Turn] = {}
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
        tools = question.tools_digest
        earlier = self._questions.get((question.steps[-1], tools, question.harness.thread))
        if earlier is not None:
            return self._again(question, earlier)
        parent, at = self._extended(question, tools)
        cause, caller = self._history.explain(question, tools, self._standing(question, parent, at))
        prompt = (
            None if parent is None else self._script.extend(self.ids(parent), question.messages[at:], question.tools)
        )
        if parent is None or prompt is None or cause is not BranchCause.CONTINUED:
            cause = BranchCause.TEMPLATE if cause is BranchCause.CONTINUED else cause
            prompt = prompt or self._script.write(question.messages, question.tools)
            return self._branch(question, tools, cause, caller, prompt)
        return Placement(
            question=question,
            cause=BranchCause.CONTINUED,
            parent=parent.number,
            prefix=parent.length,
            kept=at,
            prompt=prompt,
            tools=tools,
            same_tools=True,
            caller=caller,
        )

    def settled(self, placement: Placement) -> Placement:
        """The placement in the light of what happened beside the call since it was made, and as it is recorded."""
        placement = self._as_recorded(placement)
        if placement.cause is BranchCause.CONTINUED and placement.parent is not None:
            followed = self.turns[placement.parent].followed
            return msgspec.structs.replace(placement, cause=BranchCause.UNKNOWN) if followed else placement
        if placement.cause is BranchCause.START and not placement.tools and self._has_main_beside(placement):
            return msgspec.structs.replace(placement, cause=BranchCause.SIDE_CALL, caller=Caller.SIDE_CALL)
        return placement

    def _as_recorded(self, placement: Placement) -> Placement:
        """The question with the tool call ids of the recorded conversation, where the harness wrote others."""
        question = placement.question
        if placement.parent is None or not placement.kept or not question.chain.calls:
            return placement
        theirs = call_ids(question.messages[: placement.kept])
        names = dict(zip(theirs, self.turns[placement.parent].calls, strict=False))
        if all(theirs == ours for theirs, ours in names.items()):
            return placement
        messages = tuple(_renamed(message, names) for message in question.messages)
        return msgspec.structs.replace(
            placement, question=msgspec.structs.replace(question, messages=messages, chain=chain_of(messages))
        )

    def _has_main_beside(self, placement: Placement) -> bool:
        """Whether another conversation of the same session began with tools: then one without is not the agent's."""
        others = [call.placement for call in self.open if call.placement is not None]
        began = [other.tools for other in others if other.cause is BranchCause.START and other is not placement]
        began += [turn.tools for turn in self.turns if turn.cause is BranchCause.START]
        return any(began)

    def ids(self, turn: Turn) -> bytes:
        """Prompt and answer of a turn, packed."""
        holder = turn
        while holder.ids is None:
            assert holder.continued_by is not None, "a turn without ids is continued by one that has them"
            holder = self.turns[holder.continued_by]
        return holder.ids[: turn.length * ID_BYTES]

    def written(self, placement: Placement) -> bytes:
        """The ids of the prompt as JSON."""
        parent = None if placement.parent is None else self.turns[placement.parent]
        begun = self._written.of(parent.number) if parent and placement.prefix == parent.length else None
        return joined(begun, written(placement.suffix)) if begun else written(placement.prompt)

    def made(self, fact: TurnRecorded, placement: Placement, reply: Message, prompt: bytes = b"") -> Made:
        """What `add` takes for `fact`. `prompt` is its prompt as `written`, where that is at hand."""
        text = joined(prompt or self.written(placement), written(fact.sampled))
        chain = placement.question.chain.copy()
        chain.add(reply)
        turn = Turn(
            number=fact.turn,
            cause=fact.cause,
            parent=fact.parent,
            prefix=fact.prefix,
            kept=fact.kept,
            prompt_tokens=placement.prompt_tokens,
            length=placement.prompt_tokens + len(fact.sampled) // ID_BYTES,
            steps=(*placement.question.steps[fact.kept :], chain.value),
            tools=placement.tools,
            thread=fact.harness.thread,
            digest=fact.digest,
            request=fact.engine.request,
            status=fact.status,
            finish=fact.finish,
            reply=reply,
            ids=placement.prompt + fact.sampled,
            calls=chain.calls,
            caller=fact.caller,
            usage=fact.usage,
        )
        return Made(turn, chain, placement.question, text)

    def add(self, made: Made) -> Turn:
        """The turn, now that it is told."""
        self._written.keep(made.turn.number, made.written)
        self._index(made.turn, made.after, made.question)
        return made.turn

    def restore(self, facts: Sequence[TurnRecorded]) -> None:
        """The tree as it was, from all the turns that were told, in any order.

        Whether an answer was read to its end is known where the harness went on from it or a later turn says so.
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
                tools=question.tools_digest,
                same_tools=not fact.tools,
                caller=fact.caller,
            )
            self.add(self.made(fact, placement, reply))
            for number in fact.read:
                self.turns[number].received = True

    def read(self) -> Iterator[int]:
        """The turns whose answers were read to their end, where no other turn goes on from them."""
        return (turn.number for turn in self.turns if turn.received and turn.continued_by is None)

    def question(
        self, messages: tuple[Message, ...], tools: tuple[Tool, ...], digest: str, harness: HarnessIdentity
    ) -> Question:
        """What it has in common with the question before it is not hashed again."""
        chain, steps, bare = steps_of(messages, self._asked)
        self._asked = Question(messages, tools, tools_digest(tools), digest, chain, steps, bare, harness)
        return self._asked

    def new(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Those that the question before it did not begin with."""
        return messages[in_common(messages, self._asked.messages) :] if self._asked else messages

    def _index(self, turn: Turn, after: Chain, question: Question) -> None:
        self.turns.append(turn)
        self._after.setdefault(after.value, []).append(turn)
        key = answer_key(turn.reply)
        self._history.add(turn, after, question, key)
        if turn.status is TurnStatus.DELIVERED or key not in self._answers:
            self._answers[key] = turn
        self._questions[question.steps[-1], turn.tools, turn.thread] = turn
        self._by_digest[turn.digest] = turn
        if turn.parent is not None and turn.prefix == self.turns[turn.parent].length:
            parent = self.turns[turn.parent]
            parent.continued_by, parent.ids, parent.received = turn.number, None, True
            self._written.forget(parent.number)
            parent.followed |= turn.caller is parent.caller and turn.status is TurnStatus.DELIVERED

    def _sampled_answer(self, message: Message) -> bytes | None:
        """The ids of an answer that was sampled here, if the message is one."""
        turn = self._answers.get(answer_key(message))
        return None if turn is None else self.ids(turn)[turn.prompt_tokens * ID_BYTES :]

    def _extended(self, question: Question, tools: bytes) -> tuple[Turn | None, int]:
        """The turn with the same tools that the longest part of the conversation goes on from, and how long that is.

        Of several with equal histories and answers, one of the same thread, one that was delivered, the newest.
        """
        thread = question.harness.thread
        for at in range(len(question.steps), 0, -1):
            found = [turn for turn in self._after.get(question.steps[at - 1], ()) if turn.tools == tools]
            if found:
                delivered = TurnStatus.DELIVERED
                return max(found, key=lambda turn: (turn.thread == thread, turn.status is delivered, turn.number)), at
        return None, 0

    def _standing(self, question: Question, parent: Turn | None, at: int) -> Standing:
        """How the call stands to the record, for whoever explains it."""
        known = next((n for n in range(len(question.steps), 0, -1) if question.steps[n - 1] in self._after), 0)
        return Standing(
            parent=parent,
            at=at,
            known=known,
            fresh=all(message.role != "assistant" for message in question.messages[at:]),
        )

    def _again(self, question: Question, earlier: Turn) -> Placement:
        """The same question as `earlier`: the same prompt, whatever was recorded meanwhile."""
        resampled = earlier.status is TurnStatus.DELIVERED
        return Placement(
            question=question,
            cause=BranchCause.RESAMPLED if resampled else earlier.cause,
            parent=earlier.number if resampled else earlier.parent,
            prefix=earlier.prompt_tokens if resampled else earlier.prefix,
            kept=len(question.messages) if resampled else earlier.kept,
            prompt=self.ids(earlier)[: earlier.prompt_tokens * ID_BYTES],
            tools=earlier.tools,
            same_tools=resampled or (earlier.parent is not None and self.turns[earlier.parent].tools == earlier.tools),
            caller=earlier.caller,
        )

    def _branch(self, question: Question, tools: bytes, cause: BranchCause, caller: Caller, prompt: bytes) -> Placement:
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
            caller=caller,
        )

    def _nearest(self, prompt: bytes) -> tuple[Turn | None, int]:
        """The turn that shares the longest beginning with the prompt; the earliest one that has it all."""
        best: Turn | None = None
        longest = 0
        for turn in self.turns:
            if turn.ids is not None and (shared := common_length(turn.ids, prompt)) > longest:
                best, longest = turn, shared
        while best is not None and best.parent is not None and longest <= best.prefix:
            best = self.turns[best.parent]
        return best, longest

    def _kept(self, parent: Turn, steps: Sequence[bytes]) -> int:
        """How many messages the conversation has in common with that of `parent`."""
        kept = 0
        for ours, theirs in zip(steps, self._conversation(parent), strict=False):
            if ours != theirs:
                break
            kept += 1
        return kept

    def _conversation(self, turn: Turn) -> Iterator[bytes]:
        earlier: tuple[bytes, ...] = ()
        if turn.parent is not None and turn.kept:
            earlier = tuple(self._conversation(self.turns[turn.parent]))[: turn.kept]
        yield from earlier
        yield from turn.steps


def _renamed(message: Message, names: Mapping[str, str]) -> Message:
    if not message.tool_calls and not message.tool_call_id:
        return message
    calls = tuple(msgspec.structs.replace(call, id=names.get(call.id, call.id)) for call in message.tool_calls)
    answers = names.get(message.tool_call_id, message.tool_call_id)
    return msgspec.structs.replace(message, tool_calls=calls, tool_call_id=answers)


def room(prompt_tokens: int, window: int, limits: Iterable[int | None]) -> int:
    """How many tokens may be sampled: the least of the limits, and what the window leaves."""
    left = window - prompt_tokens
    if left < 1:
        raise PromptTooLong(prompt_tokens, window)
    return min([left, *(limit for limit in limits if limit is not None)])

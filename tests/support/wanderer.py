"""A harness that does what harnesses do to their histories, one call after the other, against the tree of an attempt.

It goes on, forks, asks again, rewrites, compacts, drops reasoning, adds messages for one call only, changes tools,
starts sub-agents and side calls with and without saying so, goes away in the middle; and the proxy restarts.
"""

import random
from dataclasses import dataclass, field

import msgspec
from byte_tokenizer import byte_tokenizer

from openforge.chat.canonical import answer_key, retry_digest
from openforge.chat.chatml import ChatMLHermes
from openforge.chat.contract import Message, Renderer, Tool, ToolCall
from openforge.protos import (
    EngineIdentity,
    FinishReason,
    HarnessIdentity,
    Sampling,
    Timing,
    TurnRecorded,
    TurnStatus,
    VersionSpan,
)
from openforge.proxy.core import Attempt, Placement, Sampled, Turn
from openforge.proxy.prompts import written
from openforge.proxy.records import Asked, reply_of, turn_fact
from openforge.proxy.turns import steps_of

RENDERER: Renderer = ChatMLHermes(byte_tokenizer())
BASH = Tool(name="bash")
OTHER = Tool(name="other")
ANSWERS = (
    "ok",
    "no",
    "<think>\nhm\n</think>\n\nok",
    '<tool_call>{"name": "bash", "arguments": {"a":   1}}</tool_call>',
    "the assistant",
)


def user(text: str) -> Message:
    return Message(role="user", content=text)


def _what_was_kept_is_what_would_be_made(tree: Attempt, placement: Placement) -> None:
    """Hashes and written ids are taken from earlier calls: they have to be those of this one."""
    question = placement.question
    chain, steps, bare = steps_of(question.messages)
    assert (question.steps, question.bare_steps, question.chain.value) == (steps, bare, chain.value)
    assert question.chain.copy()._ordinals == chain._ordinals
    assert tree.written(placement) == written(placement.prompt)


class Talk:
    """Calls of one attempt, told without a bus."""

    def __init__(self, renderer: Renderer = RENDERER) -> None:
        self.renderer = renderer
        self.tree = Attempt(renderer)
        self.facts: list[TurnRecorded] = []

    def place(
        self,
        *messages: Message,
        tools: tuple[Tool, ...] = (),
        harness: HarnessIdentity = HarnessIdentity(),
        asked: bytes = b"",
    ) -> Placement:
        question = self.tree.question(messages, tools, "", harness)
        digest = retry_digest("e.0", "chat", harness.thread, question.chain, question.tools_digest, asked)
        placement = self.tree.place(msgspec.structs.replace(question, digest=digest))
        _what_was_kept_is_what_would_be_made(self.tree, placement)
        return placement

    def tell(
        self, placement: Placement, answer: str = "ok", status: TurnStatus = TurnStatus.DELIVERED, whole: bool = True
    ) -> Turn:
        """The answer to a call that was placed, now or before other calls were told."""
        ids = [*byte_tokenizer().encode(answer, add_special_tokens=False).ids, *([2] if whole else [])]
        sampled = Sampled(ids, [-0.5] * len(ids), (), FinishReason.STOP)
        return self.record(placement, sampled, status)

    def record(self, placement: Placement, sampled: Sampled, status: TurnStatus = TurnStatus.DELIVERED) -> Turn:
        placement = self.tree.settled(placement)
        sampled.versions = (VersionSpan(0, len(sampled.ids), 0),)
        reply = reply_of(self.renderer, sampled, placement.question.tools, f"call_{len(self.facts)}_")
        asked = Asked(Sampling(temperature=1.0), b"{}", "chat", EngineIdentity(engine="e", request="q"))
        fact = turn_fact(
            "r", "e", 0, len(self.facts), placement, sampled, reply, asked, status, Timing(received_at=0.0)
        )
        self.facts.append(fact)
        return self.tree.add(self.tree.made(fact, placement, reply))

    def ask(
        self,
        *messages: Message,
        answer: str = "ok",
        tools: tuple[Tool, ...] = (),
        harness: HarnessIdentity = HarnessIdentity(),
        status: TurnStatus = TurnStatus.DELIVERED,
    ) -> Turn:
        return self.tell(self.place(*messages, tools=tools, harness=harness), answer, status)

    def restored(self) -> "Talk":
        talk = Talk(self.renderer)
        talk.facts = list(self.facts)
        talk.tree.restore(self.facts)
        return talk


@dataclass
class Line:
    """One conversation as its harness keeps it."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    harness: HarnessIdentity


@dataclass
class Wanderer:
    """`lost` are conversations whose going on did not begin with the recorded ids: there must be none.

    `unread` are the turns whose answers came to nobody, though the proxy saw them read: calls that the line doubled.
    """

    rng: random.Random
    talk: Talk = field(default_factory=Talk)
    lines: list[Line] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    unread: set[int] = field(default_factory=set)

    def wander(self, steps: int) -> None:
        for _ in range(steps):
            if not self.lines or self.rng.random() < 0.12:
                self._begin()
            line = self.rng.choice(self.lines)
            self.rng.choice(
                (
                    self._go_on,
                    self._go_on,
                    self._go_on,
                    self._fork,
                    self._ask_again,
                    self._rewrite,
                    self._drop_reasoning,
                    self._transient,
                    self._change_tools,
                    self._compact,
                    self._go_away,
                    self._two_at_once,
                    self._doubled,
                )
            )(line)
            if self.rng.random() < 0.1:
                self.talk = self.talk.restored()

    # -- what it does

    def _begin(self) -> None:
        number = len(self.lines)
        tools = self.rng.choice(((), (BASH,), (BASH,)))
        said = self.rng.choice(
            (
                HarnessIdentity(),
                HarnessIdentity(),
                HarnessIdentity(thread=f"t{number}"),
                HarnessIdentity(thread=f"t{number}", parent_thread="t0", sub_agent="spawn"),
            )
        )
        system = Message(role="system", content=self.rng.choice(("s", "s", "other system")))
        self.lines.append(Line((system,), tools, said))

    def _go_on(self, line: Line) -> None:
        new = self._new(line)
        placement = self._placed(line, new)
        if line.messages[-1].role == "assistant" and not self._begins_as_recorded(line, placement):
            self.lost.append(len(self.talk.facts))
        self._answered(line, new, self.talk.tell(placement, self.rng.choice(ANSWERS)))

    def _fork(self, line: Line) -> None:
        ends = [at + 1 for at, message in enumerate(line.messages) if message.role == "assistant"]
        twin = Line(line.messages[: self.rng.choice(ends)] if ends else line.messages, line.tools, line.harness)
        self.lines.append(twin)
        self._go_on(twin)

    def _ask_again(self, line: Line) -> None:
        new = self._new(line)
        first = self.talk.tell(self._placed(line, new), self.rng.choice(ANSWERS))
        second = self.talk.tell(
            self._placed(line, new, asked=self.rng.choice((b"", b"64000"))), self.rng.choice(ANSWERS)
        )
        self._answered(line, new, self.rng.choice((first, second, second)))

    def _rewrite(self, line: Line) -> None:
        at = self.rng.randrange(len(line.messages))
        changed = saying(line.messages[at], self.rng.choice(("x", "y")))
        line.messages = (*line.messages[:at], changed, *line.messages[at + 1 :])
        self._answered(line, new := self._new(line), self.talk.tell(self._placed(line, new), self.rng.choice(ANSWERS)))

    def _drop_reasoning(self, line: Line) -> None:
        line.messages = tuple(without_reasoning(message) for message in line.messages)
        self._answered(line, new := self._new(line), self.talk.tell(self._placed(line, new), self.rng.choice(ANSWERS)))

    def _transient(self, line: Line) -> None:
        new = self._new(line)
        turn = self.talk.tell(self._placed(line, (*new, user("only now"))), self.rng.choice(ANSWERS))
        self._answered(line, new, turn)

    def _change_tools(self, line: Line) -> None:
        line.tools = self.rng.choice(((), (BASH,), (BASH, OTHER)))
        self._answered(line, new := self._new(line), self.talk.tell(self._placed(line, new), self.rng.choice(ANSWERS)))

    def _compact(self, line: Line) -> None:
        said = HarnessIdentity(thread=line.harness.thread, purpose=self.rng.choice(("", "compaction")))
        asked = self.talk.place(*line.messages, user("sum up"), tools=(), harness=said)
        summary = self.talk.tell(asked, self.rng.choice(ANSWERS))
        line.messages = (line.messages[0], user(f"so far: {summary.reply.content}"))
        self._answered(line, (), self.talk.tell(self._placed(line, ()), self.rng.choice(ANSWERS)))

    def _go_away(self, line: Line) -> None:
        new = self._new(line)
        self.talk.tell(
            self._placed(line, new), self.rng.choice(ANSWERS), TurnStatus.ABANDONED, whole=self.rng.random() < 0.5
        )
        if self.rng.random() < 0.5:
            self._answered(line, new, self.talk.tell(self._placed(line, new), self.rng.choice(ANSWERS)))

    def _two_at_once(self, line: Line) -> None:
        first_new, second_new = self._new(line), self._new(line)
        first, second = self._placed(line, first_new), self._placed(line, second_new)
        twin = Line(line.messages, line.tools, line.harness)
        self.lines.append(twin)
        self._answered(twin, second_new, self.talk.tell(second, self.rng.choice(ANSWERS)))
        self._answered(line, first_new, self.talk.tell(first, self.rng.choice(ANSWERS)))

    def _doubled(self, line: Line) -> None:
        """The line sends the call twice at once, and one of the answers comes to nobody."""
        new = self._new(line)
        placements = [self._placed(line, new) for _ in range(2)]
        turns = [self.talk.tell(placement, self.rng.choice(ANSWERS)) for placement in placements]
        read, unread = self.rng.sample(turns, 2)
        if without_reasoning(read.reply) != without_reasoning(unread.reply):  # else its history may read as the other
            self.unread.add(unread.number)
        self._answered(line, new, read)

    # -- how it does it

    def _new(self, line: Line) -> tuple[Message, ...]:
        calls = line.messages[-1].tool_calls
        if calls and self.rng.random() < 0.8:
            return tuple(Message(role="tool", content="out", tool_call_id=call.id) for call in calls)
        return (user(self.rng.choice("abc")),)

    def _placed(self, line: Line, new: tuple[Message, ...], asked: bytes = b"") -> Placement:
        return self.talk.place(*line.messages, *new, tools=line.tools, harness=line.harness, asked=asked)

    def _answered(self, line: Line, new: tuple[Message, ...], turn: Turn) -> None:
        """As harnesses keep it: other call ids, other spacing."""
        calls = tuple(
            ToolCall(id=call.id.replace("_", ""), name=call.name, arguments=call.arguments.replace(" ", ""))
            for call in turn.reply.tool_calls
        )
        reply = turn.reply
        echo = Message(role="assistant", content=reply.content, reasoning=reply.reasoning, tool_calls=calls)
        line.messages = (*line.messages, *new, echo)

    def _begins_as_recorded(self, line: Line, placement: Placement) -> bool:
        """Whether the prompt begins with the ids of a turn after which the conversation stood as it stands."""
        key = answer_key(line.messages[-1])
        stood = self.talk.tree.question(line.messages, line.tools, "", line.harness)
        turns = [
            turn for turn in self.talk.tree.turns if turn.steps[-1] == stood.steps[-1] and turn.tools == placement.tools
        ]
        assert all(answer_key(turn.reply) == key for turn in turns)
        return not turns or any(placement.prompt.startswith(self.talk.tree.ids(turn)) for turn in turns)


def saying(message: Message, content: str) -> Message:
    return Message(role=message.role, content=content, tool_call_id=message.tool_call_id)


def without_reasoning(message: Message) -> Message:
    return Message(
        role=message.role,
        content=message.content,
        tool_calls=message.tool_calls,
        tool_call_id=message.tool_call_id,
    )

"""Where calls belong in the tree of an attempt, and what is recorded of them."""

import dataclasses
from collections.abc import Sequence
from itertools import takewhile

import pytest
from byte_tokenizer import byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from openforge.chat.canonical import retry_digest
from openforge.chat.chatml import ChatMLHermes
from openforge.chat.contract import Message, Parsed, Renderer, Tool, ToolCall
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
)
from openforge.proxy.core import (
    Asked,
    Attempt,
    Fresh,
    Join,
    OpenCall,
    Placement,
    PromptTooLong,
    Replay,
    Sampled,
    Turn,
    reply_of,
    room,
    shared_ids,
    turn_fact,
)
from openforge.tokens import merge, rebuild

RENDERER: Renderer = ChatMLHermes(byte_tokenizer())
TOOL = Tool(name="bash")


def user(text: str) -> Message:
    return Message(role="user", content=text)


def assistant(text: str, reasoning: str = "") -> Message:
    return Message(role="assistant", content=text, reasoning=reasoning)


class Talk:
    """Calls of one attempt, told without a bus."""

    def __init__(self, renderer: Renderer = RENDERER) -> None:
        self.renderer = renderer
        self.tree = Attempt(renderer)
        self.facts: list[TurnRecorded] = []

    def place(
        self, *messages: Message, tools: tuple[Tool, ...] = (), harness: HarnessIdentity = HarnessIdentity()
    ) -> Placement:
        question = self.tree.question(messages, tools, "", harness)
        digest = retry_digest("e.0", "chat", harness.thread, question.chain, tools, b"")
        return self.tree.place(dataclasses.replace(question, digest=digest))

    def ask(
        self,
        *messages: Message,
        answer: str = "ok",
        tools: tuple[Tool, ...] = (),
        harness: HarnessIdentity = HarnessIdentity(),
        status: TurnStatus = TurnStatus.DELIVERED,
    ) -> Turn:
        placement = self.place(*messages, tools=tools, harness=harness)
        ids = [*byte_tokenizer().encode(answer, add_special_tokens=False).ids, 2]
        sampled = Sampled(ids, [-0.5] * len(ids), (VersionSpan(0, len(ids), 0),), FinishReason.STOP)
        reply = reply_of(self.renderer, sampled, tools, f"call_{len(self.facts)}_")
        asked = Asked(Sampling(temperature=1.0), b"{}", "chat", EngineIdentity(engine="e", request="q"))
        timing = Timing(received_at=0.0)
        fact = turn_fact("r", "e", 0, len(self.facts), placement, sampled, reply, asked, status, timing)
        self.facts.append(fact)
        return self.tree.add(fact, placement, reply)

    def restored(self) -> "Talk":
        talk = Talk(self.renderer)
        talk.facts = list(self.facts)
        talk.tree.restore(self.facts)
        return talk


def test_a_history_that_extends_what_was_told_continues_its_ids() -> None:
    talk = Talk()
    first = talk.ask(user("a"), answer="b")
    placement = talk.place(user("a"), assistant(" b\n"), user("c"))
    assert (placement.cause, placement.parent, placement.prefix) == (BranchCause.CONTINUED, 0, first.length)
    assert placement.prompt.startswith(talk.tree.ids(first))
    assert placement.kept == 2


def test_the_parents_ids_are_found_after_it_was_continued() -> None:
    talk = Talk()
    first = talk.ask(user("a"))
    ids = talk.tree.ids(first)
    talk.ask(user("a"), assistant("ok"), user("b"))
    assert first.ids is None
    assert talk.tree.ids(first) == ids
    side = talk.place(user("a"), assistant("ok"), user("another"))
    assert (side.cause, side.parent, side.prefix) == (BranchCause.CONTINUED, 0, first.length)


def test_a_call_with_renamed_ids_and_other_spacing_continues() -> None:
    talk = Talk()
    turn = talk.ask(user("a"), answer='<tool_call>{"name": "bash", "arguments": {"a":   1}}</tool_call>', tools=(TOOL,))
    [call] = turn.reply.tool_calls
    renamed = ToolCall(id=call.id.replace("_", ""), name="bash", arguments='{"a":1}')
    placement = talk.place(
        user("a"),
        Message(role="assistant", tool_calls=(renamed,)),
        Message(role="tool", content="out", tool_call_id=renamed.id),
        tools=(TOOL,),
    )
    assert placement.cause is BranchCause.CONTINUED


class Thinking(ChatMLHermes):
    """Reads what stands before a bar as reasoning."""

    def parse(self, ids: Sequence[int], tools: Sequence[Tool]) -> Parsed:
        reasoning, _, content = super().parse(ids, tools).content.rpartition("|")
        return Parsed(content=content, reasoning=reasoning)


def test_reasoning_that_came_back_continues_and_reasoning_that_was_dropped_is_a_branch() -> None:
    talk = Talk(Thinking(byte_tokenizer()))
    talk.ask(user("a"), answer="hm|b")
    kept = talk.place(user("a"), assistant("b", "hm"), user("c"))
    dropped = talk.place(user("a"), assistant("b"), user("c"))
    assert (kept.cause, dropped.cause) == (BranchCause.CONTINUED, BranchCause.REASONING_DROPPED)


def test_branches_have_causes() -> None:
    talk = Talk()
    system = Message(role="system", content="s")
    talk.ask(system, user("a"))
    talk.ask(system, user("a"), assistant("ok"), user("b"))
    causes = {
        "tools": talk.place(system, user("a"), assistant("ok"), user("c"), tools=(TOOL,)).cause,
        "forged": talk.place(system, user("a"), assistant("ok"), user("b"), assistant("no"), user("c")).cause,
        "inserted": talk.place(system, user("a"), assistant("ok"), user("b"), assistant("ok"), assistant("x")).cause,
        "summary": talk.place(system, user("summary")).cause,
        "title": talk.place(Message(role="system", content="make a title"), user("a")).cause,
        "agent": talk.place(user("sub"), harness=HarnessIdentity(sub_agent="spawn")).cause,
        "thread": talk.place(user("sub"), harness=HarnessIdentity(thread="t2")).cause,
        "clock": talk.place(Message(role="system", content="12:01"), user("a"), assistant("ok"), user("b")).cause,
    }
    assert causes == {
        "tools": BranchCause.TOOLS_CHANGED,
        "forged": BranchCause.TEMPLATE,
        "inserted": BranchCause.TEMPLATE,
        "summary": BranchCause.COMPACTION,
        "title": BranchCause.SIDE_CALL,
        "agent": BranchCause.SUB_AGENT,
        "thread": BranchCause.SUB_AGENT,
        "clock": BranchCause.REWRITTEN,
    }


def test_a_call_that_lost_its_client_is_joined_and_one_that_has_it_is_not() -> None:
    tree = Talk().tree
    lonely, busy = OpenCall("a"), OpenCall("b", listeners=1)
    tree.open += [lonely, busy]
    assert tree.admit("a", retry=False) == Join(lonely)
    assert tree.admit("b", retry=False) == Fresh()
    assert tree.admit("b", retry=True) == Join(busy)
    lonely.given_up = True
    assert tree.admit("a", retry=False) == Fresh()


def test_a_told_answer_is_replayed_until_somebody_received_it() -> None:
    talk = Talk()
    turn = talk.ask(user("a"))
    assert talk.tree.admit(turn.digest, retry=False) == Replay(turn)
    turn.received = True
    assert talk.tree.admit(turn.digest, retry=False) == Fresh()
    assert talk.tree.admit(turn.digest, retry=True) == Replay(turn)
    talk.ask(user("a"), assistant("ok"), user("b"))
    assert talk.tree.admit(turn.digest, retry=True) == Fresh()


def test_an_abandoned_answer_is_never_replayed() -> None:
    talk = Talk()
    turn = talk.ask(user("a"), status=TurnStatus.ABANDONED)
    assert talk.tree.admit(turn.digest, retry=True) == Fresh()
    again = talk.ask(user("a"))
    assert (again.cause, again.parent) == (BranchCause.START, None)


def test_a_second_sample_of_a_question_costs_no_prompt() -> None:
    talk = Talk()
    first = talk.ask(user("a"), answer="x")
    first.received = True
    second = talk.ask(user("a"), answer="y")
    assert (second.cause, second.parent, talk.facts[1].suffix) == (BranchCause.RESAMPLED, 0, b"")
    went_on = talk.ask(user("a"), assistant("x"), user("b"))
    assert went_on.parent == 0
    merged = merge(rebuild(talk.facts))
    assert len(merged.sequences) == 1
    assert [(drop.reason, drop.tokens) for drop in merged.dropped] == [("superseded", 2)]


TEXT = st.text("abc <|>é", max_size=6)


@st.composite
def talks(draw: st.DrawFn) -> Talk:
    """A harness that goes on, rewrites, asks again, changes tools and starts side calls."""
    talk = Talk()
    histories: list[tuple[Message, ...]] = [()]
    for _ in range(draw(st.integers(1, 7))):
        history = draw(st.sampled_from(histories))
        extra = draw(st.lists(st.builds(user, TEXT), min_size=0 if history else 1, max_size=2))
        messages = (*history, *extra)
        if draw(st.integers(0, 4)) == 0:
            messages = (user(draw(TEXT)), *messages[1:])
        tools = (TOOL,) if draw(st.integers(0, 4)) == 0 else ()
        status = draw(st.sampled_from([TurnStatus.DELIVERED, TurnStatus.DELIVERED, TurnStatus.ABANDONED]))
        turn = talk.ask(*messages, answer=draw(TEXT), tools=tools, status=status)
        turn.received = True
        histories.append((*messages, turn.reply))
    return talk


@given(talks())
@settings(max_examples=60, deadline=None)
def test_every_prompt_is_what_the_record_says(talk: Talk) -> None:
    for rebuilt, turn in zip(rebuild(talk.facts), talk.tree.turns, strict=True):
        assert rebuilt.ids == talk.tree.ids(turn)
    assert merge(rebuild(talk.facts)).sampled_tokens == sum(turn.sampled_tokens for turn in talk.tree.turns)


@given(talks(), st.lists(st.builds(user, TEXT), min_size=1, max_size=2))
@settings(max_examples=60, deadline=None)
def test_a_restored_tree_places_calls_as_before(talk: Talk, new: list[Message]) -> None:
    restored = talk.restored()
    for turn, twin in zip(talk.tree.turns, restored.tree.turns, strict=True):
        assert talk.tree.ids(turn) == restored.tree.ids(twin)
        assert (turn.steps, turn.kept, turn.tools, turn.reply) == (twin.steps, twin.kept, twin.tools, twin.reply)
    for tools in ((), (TOOL,)):
        assert talk.place(*new, tools=tools).prompt == restored.place(*new, tools=tools).prompt


def test_room_is_the_least_of_all_limits() -> None:
    assert room(90, 100, (64, 20, None)) == 10
    assert room(10, 100, (64, 20, 7)) == 7
    with pytest.raises(PromptTooLong, match="has 100 tokens, which fill the window of 100"):
        room(100, 100, (64,))


@given(st.lists(st.integers(0, 3), max_size=30), st.lists(st.integers(0, 3), max_size=30))
def test_shared_ids_count_the_common_beginning(one: list[int], other: list[int]) -> None:
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
    assert shared_ids(pack_ids(one), pack_ids(other)) == common


def test_a_stop_string_is_cut_from_the_reply_but_not_from_the_ids() -> None:
    ids = list(byte_tokenizer().encode("abSTOP", add_special_tokens=False).ids)
    sampled = Sampled(ids, [0.0] * len(ids), (), FinishReason.STOP, "STOP")
    assert reply_of(RENDERER, sampled, (), "c").content == "ab"
    assert sampled.ids == ids

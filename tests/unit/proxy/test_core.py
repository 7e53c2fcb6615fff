"""Where calls belong in the tree of an attempt, and what is recorded of them."""

from collections.abc import Sequence

import pytest
from byte_tokenizer import byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from wanderer import RENDERER, Talk, user

from openforge.chat.chatml import ChatMLHermes
from openforge.chat.contract import Message, Parsed, Tool, ToolCall
from openforge.protos import BranchCause, Caller, FinishReason, HarnessIdentity, TurnStatus, pack_ids
from openforge.proxy.core import Fresh, Join, OpenCall, PromptTooLong, Replay, Sampled, room
from openforge.proxy.records import reply_of
from openforge.tokens import merge, rebuild

TOOL = Tool(name="bash")


def assistant(text: str, reasoning: str = "") -> Message:
    return Message(role="assistant", content=text, reasoning=reasoning)


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
    assert (side.cause, side.parent) == (BranchCause.REWRITTEN, 1)
    assert side.prompt.startswith(ids)


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


def test_a_shorter_conversation_that_holds_a_whole_answer_as_text_of_the_harness_is_a_compaction() -> None:
    """Whatever else was changed: Claude Code writes its system prompt anew, and some of the last turns come back."""
    talk = Talk()
    summary = "<summary>\nThe first two lines of the notes are written.\nThe third one is missing yet.\n</summary>"
    begun = (Message(role="system", content="one"), user("a"), assistant("ok"), user("b"))
    for messages in (begun[:2], begun):
        talk.ask(*messages, tools=(TOOL,))
    talk.ask(*begun, assistant("ok"), user("sum up"), answer=summary, tools=(TOOL,))
    told = "So far: The first two lines of the notes are written.\n  The third one is missing yet."
    for text, cause in ((told, BranchCause.COMPACTION), ("So far: nothing.", BranchCause.REWRITTEN)):
        rebuilt = (Message(role="system", content="two"), user(text), assistant("ok"), user("b"))
        assert talk.place(*rebuilt, tools=(TOOL,)).cause is cause


def test_a_conversation_that_was_summed_up_is_as_long_as_it_is_since_then() -> None:
    """qwen-code puts a note before the summary at its next call: that sums up nothing anew."""
    talk = Talk()
    summary = "The first two lines of the notes are written. The third one is missing yet."
    begun = (SYSTEM, user("a"), assistant("ok"), user("b"), assistant("ok"), user("c"))
    for messages in (begun[:2], begun[:4], begun):
        talk.ask(*messages, tools=(TOOL,))
    talk.ask(*begun, assistant("ok"), user("sum up"), answer=summary, tools=(TOOL,))
    assert talk.ask(SYSTEM, user(summary), tools=(TOOL,)).cause is BranchCause.COMPACTION
    noted = talk.place(SYSTEM, user("A note."), user(summary), assistant("ok"), user("d"), tools=(TOOL,))
    assert noted.cause is BranchCause.REWRITTEN


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
        "forged": BranchCause.REWRITTEN,
        "inserted": BranchCause.REWRITTEN,
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


SYSTEM = Message(role="system", content="s")
CODEX = {"thread": "t0", "window": "t0:0"}


def test_what_the_harness_says_of_itself_comes_first() -> None:
    talk = Talk()
    talk.ask(SYSTEM, user("a"), tools=(TOOL,), harness=HarnessIdentity(**CODEX))
    history = (SYSTEM, user("a"), assistant("ok"))
    summary = talk.ask(*history, user("sum up"), harness=HarnessIdentity(**CODEX, purpose="compaction"))
    went_on = talk.ask(*history, user("b"), tools=(TOOL,), harness=HarnessIdentity(**CODEX))
    refilled = talk.ask(
        SYSTEM, user("a"), user("so far: ok"), tools=(TOOL,), harness=HarnessIdentity(thread="t0", window="t0:1")
    )
    spawned = HarnessIdentity(thread="t1", parent_thread="t0", sub_agent="spawn")
    forked = talk.ask(*history, user("b"), assistant("ok"), user("look"), tools=(TOOL,), harness=spawned)
    found = [(turn.cause, turn.caller) for turn in (summary, went_on, refilled, forked)]
    assert found == [
        (BranchCause.SIDE_CALL, Caller.SIDE_CALL),
        (BranchCause.CONTINUED, Caller.MAIN),
        (BranchCause.COMPACTION, Caller.MAIN),
        (BranchCause.SUB_AGENT, Caller.SUB_AGENT),
    ]
    later = talk.place(
        *history, user("b"), assistant("ok"), user("look"), assistant("ok"), user("c"), tools=(TOOL,), harness=spawned
    )
    assert (later.cause, later.caller, later.parent) == (BranchCause.CONTINUED, Caller.SUB_AGENT, forked.number)
    main = talk.place(*history, user("b"), assistant("ok"), user("c"), tools=(TOOL,), harness=HarnessIdentity(**CODEX))
    assert (main.cause, main.caller, main.parent) == (BranchCause.CONTINUED, Caller.MAIN, went_on.number)


def test_another_name_for_a_thread_that_only_goes_on_is_no_new_agent() -> None:
    talk = Talk()
    talk.ask(user("a"), harness=HarnessIdentity(thread="t0"))
    placement = talk.place(user("a"), assistant("ok"), user("b"), harness=HarnessIdentity(thread="t9"))
    assert (placement.cause, placement.caller) == (BranchCause.CONTINUED, Caller.MAIN)


def test_a_message_for_one_call_only_costs_one_sequence_for_each_call_and_no_token() -> None:
    """As OpenClaw does it: a user message stands last and is gone in the next call."""
    talk = Talk()
    history: tuple[Message, ...] = (SYSTEM, user("a"))
    for step in range(4):
        turn = talk.ask(*history, user(f"now it is {step}"), answer=f"answer {step}")
        history = (*history, turn.reply, user("out"))
    assert [fact.cause for fact in talk.facts] == [BranchCause.START] + [BranchCause.TRANSIENT] * 3
    merged = merge(rebuild(talk.facts))
    assert (len(merged.sequences), merged.delivered_fraction) == (4, 1.0)
    for earlier, later in zip(talk.facts[1:], talk.facts[2:], strict=False):
        assert later.parent == earlier.turn


def test_an_answer_is_not_tokenised_again_where_it_stands_in_a_rewritten_history() -> None:
    talk = Talk()
    bytewise = [token for letter in "the assistant" for token in byte_tokenizer().encode(letter).ids]
    assert bytewise != byte_tokenizer().encode("the assistant").ids
    placement = talk.place(SYSTEM, user("a"))
    sampled = Sampled([*bytewise, 2], [-0.5] * (len(bytewise) + 1), (), FinishReason.STOP)
    talk.record(placement, sampled)
    rewritten = talk.place(SYSTEM, user("another"), assistant("the assistant"), user("b"))
    assert rewritten.cause is BranchCause.REWRITTEN
    assert pack_ids([*bytewise, 2]) in rewritten.prompt


def test_a_history_that_its_harness_rewrites_is_one_sequence_a_call() -> None:
    """As smolagents and browser-use do it."""
    talk = Talk()
    talk.ask(SYSTEM, user("a"), answer="call")
    talk.ask(SYSTEM, user("a"), assistant("I called"), user("out"), answer="call again")
    talk.ask(SYSTEM, user("a"), assistant("I called"), user("out"), assistant("I called again"), user("out"))
    assert [fact.cause for fact in talk.facts[1:]] == [BranchCause.REWRITTEN] * 2
    assert [fact.parent for fact in talk.facts] == [None, 0, 1]
    merged = merge(rebuild(talk.facts))
    assert (len(merged.sequences), merged.delivered_fraction) == (3, 1.0)


def test_a_title_that_is_asked_for_first_is_a_side_call() -> None:
    """As opencode does it, at the same time as its first call."""
    talk = Talk()
    title = talk.place(user("title?"))
    talk.tree.open.append(OpenCall("t", title))
    main = talk.place(SYSTEM, user("a"), tools=(TOOL,))
    talk.tree.open.append(OpenCall("m", main))
    told = [talk.tell(placement) for placement in (title, main)]
    assert [(turn.cause, turn.caller) for turn in told] == [
        (BranchCause.SIDE_CALL, Caller.SIDE_CALL),
        (BranchCause.START, Caller.MAIN),
    ]
    assert merge(rebuild(talk.facts), context=[Caller.SIDE_CALL]).dropped[0].reason == "side_call"


def test_a_title_that_was_answered_first_is_a_side_call_where_these_are_not_trained() -> None:
    talk = Talk()
    title = talk.ask(user("title?"))
    main = talk.ask(SYSTEM, user("a"), tools=(TOOL,))
    assert (title.cause, main.cause, main.caller) == (BranchCause.START, BranchCause.START, Caller.MAIN)
    merged = merge(rebuild(talk.facts), context=[Caller.SIDE_CALL])
    assert [sequence.turns for sequence in merged.sequences] == [(1,)]
    assert merged.breaks == {BranchCause.SIDE_CALL: 1}


def test_two_calls_that_go_on_from_one_turn_at_once_are_two_branches() -> None:
    talk = Talk()
    talk.ask(user("a"))
    history = (user("a"), assistant("ok"))
    first, second = talk.place(*history, user("b")), talk.place(*history, user("c"))
    assert [talk.tell(placement).cause for placement in (first, second)] == [BranchCause.CONTINUED, BranchCause.UNKNOWN]


@pytest.mark.parametrize("used", [0, 1])
@pytest.mark.parametrize("before", [(), (user("a"), assistant("ok"))], ids=["at the beginning", "later"])
def test_of_a_call_that_was_sent_twice_at_once_only_the_answer_that_was_gone_on_from_is_trained(
    before: tuple[Message, ...], used: int
) -> None:
    talk = Talk()
    if before:
        talk.ask(*before[:-1])
    placements = [talk.place(*before, user("b")) for _ in range(2)]
    twins = [talk.tell(placement, answer) for placement, answer in zip(placements, ("x", "yes"), strict=True)]
    assert [twin.cause for twin in twins] == (
        [BranchCause.CONTINUED, BranchCause.UNKNOWN] if before else [BranchCause.START, BranchCause.START]
    )
    last = talk.ask(*before, user("b"), twins[used].reply, user("c"))
    assert (last.cause, last.parent) == (BranchCause.CONTINUED, twins[used].number)
    for facts in (talk.facts, talk.restored().facts):
        merged = merge(rebuild(facts))
        [sequence] = merged.sequences
        assert sequence.turns == (*((0,) if before else ()), twins[used].number, last.number)
        assert [(drop.reason, drop.tokens) for drop in merged.dropped] == [
            ("superseded", twins[1 - used].sampled_tokens)
        ]


def test_of_equal_answers_to_a_call_that_was_sent_twice_one_is_trained() -> None:
    talk = Talk()
    talk.ask(user("a"))
    history = (user("a"), assistant("ok"), user("b"))
    for placement in [talk.place(*history) for _ in range(2)]:
        talk.tell(placement)
    talk.ask(*history, assistant("ok"), user("c"))
    assert [sequence.turns for sequence in merge(rebuild(talk.facts)).sequences] == [(0, 2, 3)]


def test_a_call_that_goes_on_where_another_was_given_up_continues() -> None:
    """As OpenClaw does it: what it repeats after a failure is not what it asked."""
    talk = Talk()
    talk.ask(user("a"))
    talk.ask(user("a"), assistant("ok"), user("b"), status=TurnStatus.ABANDONED)
    assert talk.place(user("a"), assistant("ok"), user("b, again")).cause is BranchCause.CONTINUED


def test_the_same_question_with_other_sampling_is_a_sample_of_its_own() -> None:
    """As qwen-code does it: the same prompt, with a larger limit."""
    talk = Talk()
    first = talk.ask(user("a"))
    second = talk.place(user("a"), asked=b'{"max_tokens":64000}')
    assert second.question.digest != first.digest
    assert talk.tree.admit(second.question.digest, retry=True) == Fresh()
    assert (second.cause, second.parent, second.suffix) == (BranchCause.RESAMPLED, 0, b"")


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


def test_a_stop_string_is_cut_from_the_reply_but_not_from_the_ids() -> None:
    ids = list(byte_tokenizer().encode("abSTOP", add_special_tokens=False).ids)
    sampled = Sampled(ids, [0.0] * len(ids), (), FinishReason.STOP, "STOP")
    assert reply_of(RENDERER, sampled, (), "c").content == "ab"
    assert sampled.ids == ids

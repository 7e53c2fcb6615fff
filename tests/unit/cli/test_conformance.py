"""What the script says, and what is judged of a run."""

from pathlib import Path

import msgspec
import pytest
from attempts import TURN_TOKENS, changed, command, ended, requested, sealed
from attempts import conversation as attempt
from byte_tokenizer import byte_tokenizer

from openforge.chat.chatml import ChatMLHermes
from openforge.chat.contract import Message, Tool
from openforge.cli.conformance.page import write_page
from openforge.cli.conformance.row import Row
from openforge.cli.conformance.script import ASIDE, LAST_WORD, STEPS, Script
from openforge.cli.conformance.truth import unaccounted
from openforge.harnesses import ALL, Harness, find
from openforge.harnesses.harness import mark
from openforge.protos import Span, TrajectoryVerified, TurnRecorded
from openforge.runs.config import TrainingSection
from openforge.verifier.core import Claimed, Evidence, Record, record_of, verified

TOKENIZER = byte_tokenizer()
RENDERER = ChatMLHermes(TOKENIZER)


def conversation(harness: Harness) -> list[Message]:
    return [
        Message(role="system", content="You work."),
        Message(role="user", content=f"Do the job.\n{mark(harness.name, 'plain')}"),
    ]


def answer(messages: list[Message], tools: tuple[Tool, ...]) -> Message:
    ids = Script(TOKENIZER).reply(RENDERER.render(messages, tools))
    parsed = RENDERER.parse(ids, tools)
    assert parsed.broken == ()
    assert ids[-1] in RENDERER.stop_token_ids
    return Message(role="assistant", content=parsed.content, tool_calls=parsed.tool_calls)


@pytest.mark.parametrize("harness", ALL, ids=lambda harness: harness.name)
def test_the_script_does_the_job_with_the_harnesss_own_tools_and_ends(harness: Harness) -> None:
    named = {harness.shell("").name, *([harness.finish.name] if harness.finish else [])}
    tools = tuple(Tool(name=name) for name in sorted(named)) if harness.tools else ()
    messages = conversation(harness)
    for words, commands in STEPS:
        reply = answer(messages, tools)
        assert reply.content == words or not harness.tools
        assert [msgspec.json.decode(call.arguments) for call in reply.tool_calls] == [
            dict(harness.shell(command).arguments) for command in commands if harness.tools
        ]
        messages += [reply, *(Message(role="tool", tool_call_id=call.id) for call in reply.tool_calls)]
    last = answer(messages, tools)
    assert last.tool_calls or last.content == LAST_WORD or not harness.tools


def test_a_call_beside_the_conversation_gets_an_aside() -> None:
    assert answer([Message(role="user", content="A title, please.")], ()).content == ASIDE
    assert answer(conversation(find("pi")), ()).content == ASIDE


def test_the_page_keeps_its_words_and_gets_the_new_table(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# Title\n\n<!-- table: written by `openforge conformance --docs` -->\nold\n<!-- end of table -->\nEnd.\n"
    )
    write_page(page, [Row(harness="pi", version="1", dialect="chat", calls=6, note="a | b", ok=True)])
    text = page.read_text()
    assert text.startswith("# Title\n")
    assert text.endswith("<!-- end of table -->\nEnd.\n")
    assert "| pi | 1 | chat | plain | 6 |" in text
    assert "a / b" in text
    assert "old" not in text


def test_a_page_without_a_place_for_the_table_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("# Title\n")
    with pytest.raises(ValueError, match="no place for the table"):
        write_page(tmp_path / "page.md", [])


def verdict(turns: list[TurnRecorded]) -> TrajectoryVerified:
    """What the verifier makes of these turns."""
    request = requested("shell", "rename")
    evidence = Evidence(requested=request, ended=ended(request), sealed=sealed(request, len(turns)), turns=tuple(turns))
    record = record_of(evidence, TrainingSection(guided="train"))
    assert isinstance(record, Record)
    return verified(evidence, record, Claimed(1.0), behaviour={}, verifier="v")


def test_tokens_that_a_guide_dictated_are_accounted_for() -> None:
    first, second = attempt(requested("shell", "rename"), command("ls"), command("mv a b"))
    turns = [first, changed(second, guided=True, forced=(Span(1, 2),))]
    trajectory = verdict(turns)
    assert list(unaccounted(trajectory, turns)) == []
    [complaint] = unaccounted(msgspec.structs.replace(trajectory, dropped=()), turns)
    assert (
        complaint
        == f"{2 * TURN_TOKENS} tokens were sampled, {2 * TURN_TOKENS - 2} are trained and 0 dropped with a reason"
    )


def test_a_call_that_was_sent_twice_and_is_trained_twice_is_named() -> None:
    """As every verdict was before answers that nobody went on from were left out."""
    first, second = attempt(requested("shell", "rename"), command("ls"), command("mv a b"))
    first = changed(first, digest="d")
    twin = changed(first, turn=1)
    turns = [first, twin, changed(second, turn=2, parent=0)]
    trajectory = verdict(turns)
    assert [sequence.turns for sequence in trajectory.sequences] == [(0, 2)]
    assert list(unaccounted(trajectory, turns)) == []
    both = verdict([changed(first, digest=""), changed(twin, digest=""), turns[2]])
    assert list(unaccounted(both, turns)) == ["turn 1 is trained beside turn 0, the same call sent again"]

"""What the script says, and what is judged of a run."""

from pathlib import Path

import msgspec
import pytest
from attempts import TURN_TOKENS, changed, command, ended, requested, sealed
from attempts import conversation as attempt
from byte_tokenizer import byte_tokenizer
from typer.testing import CliRunner

from openforge.chat.chatml import ChatMLHermes
from openforge.chat.contract import Message, Tool
from openforge.cli.conformance.figures import Figures
from openforge.cli.conformance.page import write_page
from openforge.cli.conformance.row import Row
from openforge.cli.conformance.script import ASIDE, HELPED, LAST_WORD, STEPS, THOUGHT_OF, Script
from openforge.cli.conformance.truth import unaccounted
from openforge.cli.main import app
from openforge.harnesses import ALL, Harness, find
from openforge.harnesses.harness import HELPER, mark
from openforge.protos import Dropped, Span, TrajectoryVerified, TurnRecorded
from openforge.runs.config import TrainingSection
from openforge.verifier.core import Claimed, Evidence, Record, record_of, verified

TOKENIZER = byte_tokenizer()
RENDERER = ChatMLHermes(TOKENIZER)


def conversation(harness: Harness, scenario: str = "plain") -> list[Message]:
    return [
        Message(role="system", content="You work."),
        Message(role="user", content=f"Do the job.\n{mark(harness.name, scenario)}"),
    ]


def tools_of(harness: Harness) -> tuple[Tool, ...]:
    ends = [use.name for use in (harness.finish, harness.helped) if use is not None]
    named = {harness.shell("").name, *ends}
    return tuple(Tool(name=name) for name in sorted(named)) if harness.tools else ()


def having(scenario: str) -> pytest.MarkDecorator:
    found = [harness for harness in ALL if scenario in harness.more and harness.tools]
    return pytest.mark.parametrize("harness", found, ids=lambda harness: harness.name)


def answer(messages: list[Message], tools: tuple[Tool, ...]) -> Message:
    ids = Script(TOKENIZER).reply(RENDERER.render(messages, tools))
    parsed = RENDERER.parse(ids, tools)
    assert parsed.broken == ()
    assert ids[-1] in RENDERER.stop_token_ids
    return Message(role="assistant", content=parsed.content, reasoning=parsed.reasoning, tool_calls=parsed.tool_calls)


@pytest.mark.parametrize("harness", ALL, ids=lambda harness: harness.name)
def test_the_script_does_the_job_with_the_harnesss_own_tools_and_ends(harness: Harness) -> None:
    tools = tools_of(harness)
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


@having("thinking")
def test_every_step_is_thought_of_where_that_is_the_scenario(harness: Harness) -> None:
    reply = answer(conversation(harness, "thinking"), tools_of(harness))
    assert (reply.reasoning, reply.content) == (THOUGHT_OF, STEPS[0][0])
    assert len(reply.tool_calls) == len(STEPS[0][1])


@having("delegation")
def test_the_second_line_is_written_by_a_sub_agent_that_the_first_agent_waits_for(harness: Harness) -> None:
    assert harness.delegate is not None
    delegate = harness.delegate("").name
    tools = (*tools_of(harness), Tool(name=delegate), *([Tool(name=harness.wait("").name)] if harness.wait else []))
    messages = conversation(harness, "delegation")
    messages += [answer(messages, tools), user("done")]
    given = answer(messages, tools)
    assert [call.name for call in given.tool_calls] == [delegate]
    job = next(text for text in msgspec.json.decode(given.tool_calls[0].arguments).values() if HELPER in text)
    helper = [user(job)]
    wrote = answer(helper, tools_of(harness))
    assert [msgspec.json.decode(call.arguments) for call in wrote.tool_calls] == [
        dict(harness.shell("echo two >> notes.txt").arguments)
    ]
    end = answer([*helper, wrote, user("done")], tools_of(harness))
    assert (end.content, [call.name for call in end.tool_calls]) == (
        ("", [harness.helped.name]) if harness.helped else (HELPED, [])
    )
    waits = answer([*messages, given, user('{"agent_id": "a-1"}')], tools)
    assert "notes.txt" in waits.tool_calls[-1].arguments
    if harness.wait:
        assert msgspec.json.decode(waits.tool_calls[0].arguments) == {"targets": ["a-1"]}


@having("compaction")
def test_after_a_summary_the_job_goes_on_where_it_was(harness: Harness) -> None:
    tools = tools_of(harness)
    messages = conversation(harness, "compaction")
    for _ in range(3):
        messages += [answer(messages, tools), user("done")]
    summary = answer([*messages, user("Create a detailed summary of the conversation so far.")], tools)
    assert summary.tool_calls == ()
    assert summary == answer([*messages, user("Sum up.")], ())
    rebuilt = [messages[0], user(f"So far: {summary.content}")]
    fourth = answer(rebuilt, tools)
    assert fourth.content == STEPS[3][0]
    assert answer([*rebuilt, *messages[-2:]], tools) == fourth  # the summary knows of what was kept beside it
    assert answer([*rebuilt, *messages[-2:], fourth, user("done")], tools).content == STEPS[4][0]
    quoted = msgspec.json.encode(messages).decode()
    assert answer([user(f"A summary, please: {quoted}")], ()) == summary


def user(text: str) -> Message:
    return Message(role="user", content=text)


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


def test_the_figures_are_whole_after_each_row_and_in_the_order_of_the_table(tmp_path: Path) -> None:
    figures = Figures(tmp_path / "deep" / "figures.json", [("pi", "plain"), ("pi", "faults")])
    for shown, scenario in enumerate(("real", "faults", "plain"), start=1):
        figures.add(Row(harness="pi", version="1", dialect="chat", scenario=scenario))
        assert len(msgspec.json.decode(figures.out.read_bytes())) == shown
    rows = msgspec.json.decode(figures.out.read_bytes(), type=list[Row])
    assert [row.scenario for row in rows] == ["plain", "faults", "real"]
    assert [path.name for path in figures.out.parent.iterdir()] == ["figures.json"]


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (("pi", "--docs", "page.md"), "writes the whole table"),
        (("--real", "--docs", "page.md"), "writes the whole table"),
        (("--real", "--judge"), "--real hosts and judges its own jobs"),
        (("--real", "--only", "plain"), "--real hosts and judges its own jobs"),
        (("pi", "--only", "delegation"), "there is no scenario delegation"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_started(asked: tuple[str, ...], why: str) -> None:
    result = CliRunner().invoke(app, ["conformance", *asked])
    assert (result.exit_code, why in result.output) == (2, True), result.output


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


def test_an_answer_that_the_harness_gave_back_and_that_is_not_trained_is_named() -> None:
    """As where a proxy is killed that alone knew who had read it, and no prompt goes on from it token by token."""
    first, second = attempt(requested("shell", "rename"), command("ls"), command("mv a b"))
    turns = [first, changed(second, kept=2)]
    trajectory = verdict(turns)
    assert list(unaccounted(trajectory, turns)) == []
    [sequence] = trajectory.sequences
    without = msgspec.structs.replace(
        sequence, turns=(1,), loss=tuple(span for span in sequence.loss if span.start > TURN_TOKENS)
    )
    dropped = (Dropped(reason="orphaned", tokens=TURN_TOKENS),)
    lost = msgspec.structs.replace(trajectory, sequences=(without,), dropped=dropped)
    assert list(unaccounted(lost, turns)) == ["turn 0 was used and is not trained"]

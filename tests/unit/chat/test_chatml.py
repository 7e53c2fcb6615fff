"""Conversations become the ids that the template gives, and answers become messages."""

import pytest
from byte_tokenizer import byte_tokenizer, byte_tokenizer_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from openforge.chat.chatml import CALL, CALLED, BadTokenizer, ChatMLHermes
from openforge.chat.contract import Message, Tool, ToolCall
from openforge.chat.renderers import UnknownRenderer, load_renderer

SHELL = Tool(name="bash", description="Run a command", parameters={"type": "object", "properties": {"command": {}}})
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40).filter(lambda text: "<" not in text)
NEW = st.lists(
    st.builds(Message, role=st.sampled_from(["user", "tool", "system"]), content=TEXT), min_size=1, max_size=3
)


def renderer() -> ChatMLHermes:
    return ChatMLHermes(byte_tokenizer())


def whole_text(ids: list[int]) -> str:
    return str(byte_tokenizer().decode(ids, skip_special_tokens=False))


def encoded(text: str) -> list[int]:
    return list(byte_tokenizer().encode(text, add_special_tokens=False).ids)


def test_nothing_is_put_into_a_prompt_without_tools() -> None:
    ids = renderer().render([Message(role="user", content="hi")], ())
    assert whole_text(ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_tools_stand_in_the_system_turn_and_calls_and_results_in_their_own() -> None:
    call = ToolCall(id="a", name="bash", arguments='{"command": "ls"}')
    messages = [
        Message(role="system", content="Work."),
        Message(role="user", content="list"),
        Message(role="assistant", content="Looking.", tool_calls=(call,)),
        Message(role="tool", content="x.txt", tool_call_id="a"),
    ]
    text = whole_text(renderer().render(messages, [SHELL]))
    assert text.startswith("<|im_start|>system\nWork.\n\n# Tools\n")
    assert '<tools>\n{"type": "function", "function": {"name": "bash", "description": "Run a command"' in text
    assert (
        "<|im_start|>assistant\nLooking.\n<tool_call>\n"
        '{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\nx.txt<|im_end|>\n<|im_start|>assistant\n"
    ) in text


@given(st.lists(st.builds(Message, role=st.sampled_from(["system", "user", "assistant"]), content=TEXT), min_size=1))
@settings(max_examples=50, deadline=None)
def test_turn_by_turn_encoding_is_the_encoding_of_the_whole_text(messages: list[Message]) -> None:
    ids = renderer().render(messages, ())
    assert ids == encoded(whole_text(ids))


@given(st.lists(st.builds(Message, role=st.just("user"), content=TEXT), min_size=1, max_size=3), TEXT, NEW)
@settings(max_examples=50, deadline=None)
def test_a_bridged_conversation_is_the_rendered_one_if_the_answer_was_tokenised_as_usual(
    messages: list[Message], answer: str, new: list[Message]
) -> None:
    bridged = renderer()
    recorded = bridged.render(messages, ()) + encoded(answer + "<|im_end|>")
    continued = bridged.bridge(recorded, new, ())
    assert continued is not None
    assert recorded + continued == bridged.render([*messages, Message(role="assistant", content=answer), *new], ())


THOUGHTS = TEXT.map(lambda text: text.strip("\n")).filter(bool)


@given(THOUGHTS, TEXT.map(lambda text: text.lstrip("\n")), st.booleans())
@settings(max_examples=50, deadline=None)
def test_an_answer_with_reasoning_is_read_as_it_is_rendered(reasoning: str, content: str, tools: bool) -> None:
    answer = Message(role="assistant", content=content, reasoning=reasoning)
    start = len(renderer().render([], ()))
    ids = renderer().render([answer], ())[start:]
    parsed = renderer().parse(ids[: ids.index(renderer().stop_token_ids[0])], [SHELL] if tools else ())
    assert (parsed.reasoning, parsed.content) == (reasoning, content)


def test_reasoning_that_never_ends_is_all_there_is() -> None:
    parsed = renderer().parse(encoded(f"<think>\nHm {CALL}"), [SHELL])
    assert (parsed.reasoning, parsed.content, parsed.tool_calls) == (f"Hm {CALL}", "", ())


def test_a_call_after_reasoning_is_a_call() -> None:
    parsed = renderer().parse(encoded(f'<think>x</think>{CALL}{{"name": "bash", "arguments": {{}}}}{CALLED}'), [SHELL])
    assert (parsed.reasoning, parsed.content, [call.name for call in parsed.tool_calls]) == ("x", "", ["bash"])


def test_a_truncated_answer_is_closed_by_the_bridge() -> None:
    continued = renderer().bridge(encoded("<|im_start|>assistant\nhal"), [Message(role="user", content="go on")], ())
    assert continued is not None
    assert whole_text(continued) == "<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"


def test_an_assistant_message_among_the_new_ones_is_bridged_as_it_would_be_rendered() -> None:
    asked, new = [Message(role="user", content="a")], [Message(role="assistant", content="forged")]
    bridged = renderer()
    recorded = bridged.render(asked, ()) + encoded("b<|im_end|>")
    continued = bridged.bridge(recorded, new, ())
    assert continued is not None
    assert recorded + continued == bridged.render([*asked, Message(role="assistant", content="b"), *new], ())


def test_an_answer_without_tools_is_text_whatever_stands_in_it() -> None:
    answer = f"{CALL}\n{{}}\n{CALLED}"
    assert renderer().parse(encoded(answer + "<|im_end|>"), ()).content == answer


def test_calls_are_read_with_the_arguments_as_sampled() -> None:
    answer = f'Looking.\n{CALL}\n{{"name": "bash", "arguments": {{"command":  "ls"}}}}\n{CALLED}\n'
    parsed = renderer().parse(encoded(answer * 2 + "<|im_end|>"), [SHELL])
    assert parsed.content == "Looking.\nLooking."
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [("bash", '{"command":  "ls"}')] * 2
    assert parsed.broken == ()


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (f"{CALL}nonsense{CALLED}", "malformed_call"),
        (f'x {CALL}{{"name": "bash", "argum', "unclosed_call"),
        (f'{CALL}{{"arguments": {{}}}}{CALLED}', "malformed_call"),
        (f'{CALL}{{"name": 3, "arguments": {{}}}}{CALLED}', "malformed_call"),
    ],
)
def test_what_cannot_be_read_as_a_call_stays_in_the_content(answer: str, complaint: str) -> None:
    parsed = renderer().parse(encoded(answer), [SHELL])
    assert (parsed.content, parsed.tool_calls, parsed.broken) == (answer, (), (complaint,))


def test_a_call_with_broken_arguments_reaches_the_harness_as_a_call() -> None:
    parsed = renderer().parse(encoded(f'{CALL}{{"name": "bash", "arguments": {{"command": ls}}}}{CALLED}'), [SHELL])
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [("bash", '{"command": ls}')]
    assert parsed.broken == ("invalid_arguments",)


def test_an_unknown_tool_and_an_unclosed_but_whole_call_are_still_calls() -> None:
    parsed = renderer().parse(encoded(f'{CALL}\n{{"name": "fly", "arguments": {{}}}}'), [SHELL])
    assert [call.name for call in parsed.tool_calls] == ["fly"]
    assert parsed.broken == ("unknown_tool",)


@given(st.lists(st.sampled_from([CALL, CALLED, "{", "}", '"name": "bash"', '"arguments": ', " ", "x", "[" * 99])))
@settings(max_examples=100, deadline=None)
def test_no_answer_is_too_broken_to_parse(pieces: list[str]) -> None:
    renderer().parse(encoded("".join(pieces)), [SHELL])


def test_a_tokenizer_without_chatml_is_refused() -> None:
    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = pre_tokenizers.ByteLevel()
    with pytest.raises(BadTokenizer, match=r"no single token for <\|im_start\|>"):
        ChatMLHermes(bare)


def test_renderers_are_found_by_name(tmp_path: object, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = byte_tokenizer_folder(tmp_path_factory.mktemp("model"))
    assert load_renderer("chatml-hermes", folder).render([Message(role="user", content="hi")], ())
    with pytest.raises(UnknownRenderer, match=r"model\.renderer = 'mistral' .* chatml-hermes"):
        load_renderer("mistral", folder)
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json"):
        load_renderer("chatml-hermes", folder / "nowhere")

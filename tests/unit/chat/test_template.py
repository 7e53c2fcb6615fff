"""Our renderer and the chat template that our models carry give the same ids."""

from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from openforge.chat.chatml import ChatMLHermes, tool_as_json
from openforge.chat.contract import Message, Tool, ToolCall

TEMPLATE = Path(__file__).parents[3] / "libs/openforge/models/chatml_hermes.jinja"
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).filter(lambda text: "<|" not in text)
NAME = st.text("abc_é", min_size=1, max_size=4)
CALL = st.builds(ToolCall, id=NAME, name=NAME, arguments=st.sampled_from(["{}", '{"a": "é"}', '{"a":  1']))
MESSAGE = st.builds(Message, role=st.sampled_from(["system", "user", "tool"]), content=TEXT) | st.builds(
    Message, role=st.just("assistant"), content=TEXT, reasoning=TEXT, tool_calls=st.lists(CALL, max_size=2).map(tuple)
)
TOOL = st.builds(Tool, name=NAME, description=TEXT, parameters=st.just({"type": "object", "properties": {"é": {}}}))


def as_told(message: Message) -> dict[str, Any]:
    told: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        told["reasoning_content"] = message.reasoning
    if message.tool_calls:
        told["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return told


@pytest.fixture(scope="module")
def oracle() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), chat_template=TEMPLATE.read_text())


@given(st.lists(MESSAGE, min_size=1, max_size=4), st.lists(TOOL, max_size=2))
@settings(max_examples=100, deadline=None)
def test_the_template_and_the_renderer_agree(
    oracle: PreTrainedTokenizerFast, messages: list[Message], tools: list[Tool]
) -> None:
    expected = oracle.apply_chat_template(
        [as_told(message) for message in messages],
        tools=[tool_as_json(tool) for tool in tools] or None,
        add_generation_prompt=True,
        return_dict=False,
    )
    assert ChatMLHermes(byte_tokenizer()).render(messages, tools) == expected

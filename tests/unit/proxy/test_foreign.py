"""Calls to an endpoint that tells no ids: what goes out, what is made of its answers."""

import msgspec
import pytest

from openforge.chat.contract import Message, Tool, ToolCall, ToolChoice
from openforge.chat.dialect import Request
from openforge.protos import FinishReason, Sampling, Usage
from openforge.proxy.foreign import body_of, said_by
from openforge.proxy.upstream import EngineBroken

SEARCH = Tool(name="web.search", namespace="web", parameters={"type": "object"})
PINNED = Sampling(temperature=0.7, top_p=0.9, max_tokens=64, stop=("END",), seed=5)
CALL = ToolCall(id="c1", name="web.search", arguments='{"q": 1}')
TALK = (
    Message(role="user", content="Look."),
    Message(role="assistant", content="Well.", reasoning="Hm.", tool_calls=(CALL,)),
    Message(role="tool", content="found", tool_call_id="c1"),
)


def test_a_call_goes_out_with_the_runs_sampling_and_names_that_endpoints_take() -> None:
    request = Request(model="x", messages=TALK, tools=(SEARCH,), parallel_calls=False, max_tokens=9)
    body = body_of(request, PINNED)
    assert (body["temperature"], body["top_p"], body["max_tokens"], body["stop"], body["seed"]) == (
        0.7,
        0.9,
        64,
        ["END"],
        5,
    )
    assert body["tools"][0]["function"]["name"] == "web__search"
    assert (body["tool_choice"], body["parallel_tool_calls"]) == ("auto", False)
    asked, answered, result = body["messages"]
    assert (asked["role"], answered["tool_calls"][0]["function"]["name"]) == ("user", "web__search")
    assert "reasoning" not in answered
    assert (result["role"], result["tool_call_id"]) == ("tool", "c1")


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        (ToolChoice("required"), "required"),
        (ToolChoice("named", ("web.search",)), {"type": "function", "function": {"name": "web__search"}}),
        (ToolChoice("named", ("web.search", "other")), "required"),
    ],
)
def test_the_choice_among_tools_is_the_harnesss(choice: ToolChoice, sent: object) -> None:
    body = body_of(Request(model="x", messages=TALK, tools=(SEARCH,), tool_choice=choice), PINNED)
    assert body["tool_choice"] == sent


def test_a_call_without_tools_names_none_and_a_schema_goes_along() -> None:
    request = Request(model="x", messages=TALK, tool_choice=ToolChoice("none"), schema=b'{"type": "object"}')
    body = body_of(request, PINNED)
    assert "tools" not in body
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}


def test_an_answer_is_a_message_with_our_names_and_the_endpoints_counts() -> None:
    call = {"id": "z", "type": "function", "function": {"name": "web__search", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call]}
    usage = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}}
    said = said_by({"choices": [{"message": message, "finish_reason": "tool_calls"}], "usage": usage}, (SEARCH,))
    assert (said.message.content, said.message.reasoning) == ("", "Hm.")
    assert said.message.tool_calls == (ToolCall(id="z", name="web.search", arguments="{}"),)
    assert (said.finish, said.usage) == (
        FinishReason.STOP,
        Usage(prompt_tokens=9, completion_tokens=4, cached_tokens=2),
    )


def test_a_cut_answer_is_one_and_counts_that_are_not_told_are_none() -> None:
    said = said_by({"choices": [{"message": {"content": "Onc"}, "finish_reason": "length"}]}, ())
    assert (said.message.content, said.finish, said.usage) == ("Onc", FinishReason.LENGTH, Usage())


@pytest.mark.parametrize(
    "answer",
    [
        b"{}",
        b"[]",
        b'{"choices": []}',
        b'{"choices": null}',
        b'{"choices": [{"message": "Hi."}]}',
        b'{"choices": 3}',
        b'{"choices": [{"message": {"content": "Hi.", "tool_calls": 7}}]}',
        b'{"choices": [{"message": {"content": "Hi.", "tool_calls": [{"function": null}]}}]}',
        b'{"choices": [{"message": {"content": "Hi."}}], "usage": {"prompt_tokens": "many"}}',
        b'{"choices": [{"message": {"content": "Hi."}}], "usage": [1]}',
        b'{"choices": [{"message": {"content": "Hi."}}], "usage": {"prompt_tokens_details": {"cached_tokens": "x"}}}',
    ],
)
def test_what_is_no_answer_is_asked_again(answer: bytes) -> None:
    with pytest.raises(EngineBroken, match="no message"):
        said_by(msgspec.json.decode(answer), ())

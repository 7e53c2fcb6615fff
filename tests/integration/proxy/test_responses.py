"""Responses calls of the official client library: items and events, branches, reasoning that comes back sealed."""

import base64
import json
from typing import Any

import openai
import pytest
from proxy_fixtures import ProxyAtWork
from stub_engine import StubEngine, ids_of

from openforge.protos import BlobRef, BranchCause, Dropped, FinishReason, Span
from openforge.tokens import merge, rebuild
from openforge.wire.generate import StructuredOutputs

USER = {"role": "user", "content": "hi"}
TOOLS = [
    {"type": "custom", "name": "shell", "format": {"type": "text"}},
    {"type": "namespace", "name": "team", "tools": [{"type": "function", "name": "ask", "parameters": {}}]},
    {"type": "web_search"},
]
SEALED = ["reasoning.encrypted_content"]


def calling(name: str, arguments: str, thought: str) -> str:
    call = f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    return f"<think>\n{thought}\n</think>\n\nDoing.\n{call}"


async def answer(client: openai.AsyncOpenAI, streaming: bool, **request: Any) -> Any:
    """The whole response, by either way."""
    if not streaming:
        return await client.responses.create(model="m", **request)
    async with client.responses.stream(model="m", **request) as stream:
        async for _ in stream:
            pass
        return await stream.get_final_response()


@pytest.mark.parametrize("streaming", [False, True])
async def test_turns_with_every_kind_of_call_are_one_branch_token_by_token(
    proxy: ProxyAtWork, stub_engine: StubEngine, streaming: bool
) -> None:
    stub_engine.says(
        calling("shell", '{"input":  "ls"}', "Look."),
        calling("shell", '{"command": "ls"}', "Not what it takes."),
        calling("team.ask", '{"x":  1}', "Ask."),
        "Done.",
    )
    client = await proxy.client()
    items: list[Any] = [USER]
    for _ in range(4):
        told = await answer(client, streaming, input=items, tools=TOOLS, include=SEALED, instructions="Work.")
        output = [item.model_dump(exclude_none=True) for item in told.output]
        for item in output:
            item.pop("parsed_arguments", None)
            item["summary"] = []  # as a harness that shows no reasoning
        items += output
        items += [
            {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "out"}
            for item in output
            if "call_id" in item
        ]
    assert (told.output_text, told.status) == ("Done.", "completed")
    turns = await proxy.turns()
    assert [turn.cause for turn in turns] == [BranchCause.START] + [BranchCause.CONTINUED] * 3
    merged = merge(rebuild(turns))
    assert (len(merged.sequences), merged.delivered_fraction) == (1, 1.0)
    assert {turn.dialect for turn in turns} == {"responses"}
    assert "web_search" in json.loads(turns[0].asked)["notes"][0]
    calls = [item for item in items if item.get("type") in ("function_call", "custom_tool_call")]
    assert [(call["type"], call["name"], call.get("namespace")) for call in calls] == [
        ("custom_tool_call", "shell", None),
        ("custom_tool_call", "shell", None),
        ("function_call", "ask", "team"),
    ]
    assert [call["input"] for call in calls[:2]] == ["ls", '{"command": "ls"}']


async def test_a_stream_tells_reasoning_and_text_as_they_come_and_true_usage(
    proxy: ProxyAtWork, stub_engine: StubEngine
) -> None:
    stub_engine.says("<think>\nHm.\n</think>\n\nYes.")
    client = await proxy.client()
    thought = said = ""
    async for event in await client.responses.create(model="m", input="hi", stream=True):
        match event.type:
            case "response.reasoning_summary_text.delta":
                thought += event.delta
            case "response.output_text.delta":
                said += event.delta
            case "response.completed":
                usage = event.response.usage
    assert (thought, said) == ("Hm.", "Yes.")
    assert usage is not None
    assert usage.output_tokens_details.reasoning_tokens == len(ids_of("<think>\nHm.\n</think>"))
    [turn] = await proxy.turns()
    assert usage.total_tokens == len(turn.suffix) // 4 + len(turn.sampled) // 4


async def test_a_cut_answer_is_incomplete_and_a_full_window_is_told_as_harnesses_know_it(
    proxy: ProxyAtWork, stub_engine: StubEngine
) -> None:
    stub_engine.script = lambda request: ids_of("x" * 500)
    client = await proxy.client(tokens=5)
    told = await client.responses.create(model="m", input="hi")
    assert (told.status, told.incomplete_details and told.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
    [turn] = await proxy.turns()
    assert turn.finish is FinishReason.LENGTH
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(model="m", input="y" * 9000)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="send the whole conversation in input"):
        await client.responses.create(model="m", input="hi", previous_response_id="resp_1")
    counted = await client.responses.input_tokens.count(model="m", input="hi")
    assert counted.input_tokens == len(stub_engine.requests[0].token_ids)


async def test_images_are_kept_by_digest_and_the_model_is_shown_the_text(
    proxy: ProxyAtWork, stub_engine: StubEngine
) -> None:
    client = await proxy.client()
    picture = b"\x89PNG not really"
    url = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
    parts = [{"type": "input_text", "text": "look"}, {"type": "input_image", "image_url": url}]
    told = await client.responses.create(model="m", input=[{"role": "user", "content": parts}])  # type: ignore[list-item,misc]
    await client.responses.create(
        model="m",
        input=[{"role": "user", "content": parts}, *told.output, USER],  # type: ignore[list-item,misc]
    )
    first, second = await proxy.turns()
    assert stub_engine.requests[0].token_ids == ids_of("<|im_start|>user\nlook<|im_end|>\n<|im_start|>assistant\n")
    assert "1 images are recorded and not shown" in json.loads(first.asked)["notes"][0]
    assert (second.cause, second.images) == (BranchCause.CONTINUED, ())
    [digest] = first.images
    assert await proxy.bus.blobs.get(BlobRef(digest.removeprefix("sha256:"), len(picture))) == picture


async def test_forced_calls_are_asked_of_the_engine_and_tokens_without_alternative_are_not_trained(
    proxy: ProxyAtWork, stub_engine: StubEngine
) -> None:
    stub_engine.says('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>')
    stub_engine.logprob = lambda index: 0.0 if index in (0, 1, 4) else -0.5
    client = await proxy.client()
    tool: Any = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    await client.responses.create(model="m", input="hi", tools=[tool], tool_choice="required")
    wanted = stub_engine.requests[0].sampling_params.structured_outputs
    assert wanted is not None
    assert wanted.grammar is not None
    assert wanted.grammar.startswith('start: call ("\\n" call)*\n')
    [turn] = await proxy.turns()
    assert turn.forced == (Span(0, 2), Span(4, 1))
    assert turn.guided
    merged = merge(rebuild([turn]))
    assert merged.dropped == (Dropped(reason="forced", tokens=3),)
    assert merged.delivered_fraction == pytest.approx(1 - 3 / merged.sampled_tokens)
    form: Any = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}
    await client.responses.create(model="m", input="hi", text=form)
    assert stub_engine.requests[1].sampling_params.structured_outputs == StructuredOutputs(json='{"type":"object"}')
    await client.responses.create(model="m", input="hi")
    assert stub_engine.requests[2].sampling_params.structured_outputs is None


async def test_a_schema_that_no_engine_can_follow_is_a_bad_request_that_names_the_field(
    proxy: ProxyAtWork, stub_engine: StubEngine
) -> None:
    stub_engine.fail_status, stub_engine.fail = 400, 4
    client = await proxy.client()
    form: Any = {"format": {"type": "json_schema", "name": "n", "schema": {"type": 3}}}
    tool: Any = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": 3}}
    for streaming in (False, True):
        with pytest.raises(openai.BadRequestError, match=r"text\.format cannot be followed") as refused:
            await client.responses.create(model="m", input="hi", text=form, stream=streaming)
        assert refused.value.response.headers["x-should-retry"] == "false"
    with pytest.raises(openai.BadRequestError, match="tools cannot be followed"):
        await client.responses.create(model="m", input="hi", tools=[tool], tool_choice="required")
    with pytest.raises(openai.BadRequestError, match=r"tools or text\.format cannot be followed"):
        await client.responses.create(model="m", input="hi", text=form, tools=[tool])
    sealed = await proxy.end()
    assert (sealed.malformed, sealed.engine_failures, sealed.turns) == (4, 0, ())


async def test_what_the_engine_had_computed_before_is_told(proxy: ProxyAtWork, stub_engine: StubEngine) -> None:
    client = await proxy.client()
    first = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    assert first.usage is not None
    assert first.usage.prompt_tokens_details is None
    stub_engine.cached_tokens = 7
    second = await client.responses.create(model="m", input="ho")
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens == 7

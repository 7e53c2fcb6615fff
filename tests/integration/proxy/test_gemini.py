"""The official Gemini client against the proxy: what it is told, and what is recorded."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from google import genai
from google.genai import errors, types
from proxy_fixtures import ProxyAtWork
from stub_engine import Gate, StubEngine, ids_of

from openforge.protos import BranchCause, TurnStatus
from openforge.tokens import merge, rebuild

pytestmark = pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")
"""What the client does with its own HTTP library."""

BASH = types.FunctionDeclaration(
    name="bash", description="Run.", parameters_json_schema={"type": "object", "properties": {"command": {}}}
)
CONFIG = types.GenerateContentConfig(
    tools=[types.Tool(function_declarations=[BASH])],
    system_instruction="Work.",
    thinking_config=types.ThinkingConfig(include_thoughts=True),
    automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
)


def base_of(proxy: ProxyAtWork) -> str:
    return proxy.base_url().removesuffix("/v1")


@asynccontextmanager
async def client_of(proxy: ProxyAtWork) -> AsyncIterator[genai.Client]:
    options = types.HttpOptions(base_url=base_of(proxy), timeout=60_000)
    client = genai.Client(api_key=await proxy.key(tokens=512), http_options=options)
    try:
        yield client
    finally:
        await client.aio.aclose()
        client.close()


def call_text(*arguments: str) -> str:
    calls = (f'<tool_call>\n{{"name": "bash", "arguments": {each}}}\n</tool_call>' for each in arguments)
    return "Doing.\n" + "\n".join(calls)


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_chat_with_parallel_calls_and_thoughts_is_one_branch(
    proxy: ProxyAtWork, stub_engine: StubEngine, streaming: bool
) -> None:
    """The client keeps the history itself, of a streamed answer piece by piece."""
    stub_engine.says(
        "<think>\nHow?\n</think>\n\n" + call_text('{"command":   "a"}', '{"command": "b"}'),
        call_text('{"command": '),
        "<think>\nDone?\n</think>\n\nDone.",
        "Yes.",
    )
    seen: list[types.GenerateContentResponse] = []
    async with client_of(proxy) as client:
        chat = client.aio.chats.create(model="m", config=CONFIG)
        message: list[types.Part] | str = "hi"
        for _ in range(4):
            if streaming:
                told = [chunk async for chunk in await chat.send_message_stream(message)]
            else:
                told = [await chat.send_message(message)]
            seen.append(told[-1])
            calls = [call for chunk in told for call in chunk.function_calls or []]
            results = [
                types.FunctionResponse(id=call.id, name=call.name, response={"output": f"out of {call.args}"})
                for call in calls
            ]
            message = [types.Part(function_response=result) for result in results[::-1]] or "more"
    turns = await proxy.turns()
    assert [turn.cause for turn in turns] == [BranchCause.START] + [BranchCause.CONTINUED] * 3
    assert {turn.dialect for turn in turns} == {"gemini"}
    merged = merge(rebuild(turns))
    assert (len(merged.sequences), merged.delivered_fraction, merged.extra_prefill_ratio) == (1, 1.0, 1.0)
    for earlier, later in zip(stub_engine.requests, stub_engine.requests[1:], strict=False):
        assert later.token_ids[: len(earlier.token_ids)] == earlier.token_ids
    last = seen[-1]
    assert last.candidates is not None
    assert last.candidates[0].finish_reason is types.FinishReason.STOP
    assert last.usage_metadata is not None
    assert last.usage_metadata.prompt_token_count == len(stub_engine.requests[-1].token_ids)
    assert last.usage_metadata.candidates_token_count == len(ids_of("Yes.")) + 1
    assert seen[2].usage_metadata is not None
    assert seen[2].usage_metadata.thoughts_token_count


async def test_the_model_is_listed_and_counting_renders_the_prompt_that_a_call_would_have(
    proxy: ProxyAtWork, stub_engine: StubEngine
) -> None:
    async with client_of(proxy) as client:
        counted = await client.aio.models.count_tokens(model="m", contents="hi")
        await client.aio.models.generate_content(model="m", contents="hi")
        assert [model.name async for model in await client.aio.models.list()] == ["models/r"]
        assert counted.total_tokens == len(stub_engine.requests[-1].token_ids)


async def test_errors_are_those_of_the_dialect(proxy: ProxyAtWork) -> None:
    async with client_of(proxy) as client:
        with pytest.raises(errors.ClientError, match=r"\(\d{4}\) exceeds the maximum number of tokens allowed") as long:
            await client.aio.models.generate_content(model="m", contents="x" * 6000)
        assert (long.value.code, long.value.status) == (400, "INVALID_ARGUMENT")
        await proxy.end()
        with pytest.raises(errors.ClientError, match="has ended") as over:
            async for _ in await client.aio.models.generate_content_stream(model="m", contents="hi"):
                pass
        assert (over.value.code, over.value.status) == (409, "ABORTED")


async def test_without_alt_sse_a_stream_is_one_json_array(proxy: ProxyAtWork, stub_engine: StubEngine) -> None:
    stub_engine.says("abc")
    key = await proxy.key()
    body = {"contents": [{"parts": [{"text": "hi"}]}]}
    async with httpx.AsyncClient(base_url=base_of(proxy), headers={"x-goog-api-key": key}) as client:
        answer = await client.post("/v1beta/models/m:streamGenerateContent", json=body)
    assert answer.headers["content-type"] == "application/json"
    parts = [part for chunk in answer.json() for part in chunk["candidates"][0]["content"]["parts"]]
    assert "".join(part["text"] for part in parts) == "abc"
    assert answer.json()[-1]["candidates"][0]["finishReason"] == "STOP"


async def test_a_client_that_gave_up_joins_its_first_call_when_it_repeats(
    proxy: ProxyAtWork, stub_engine: StubEngine
) -> None:
    """gemini-cli takes a minute of silence for an end, and nothing can be sent to keep it: it asks again soon."""
    gate = Gate(upto=0)
    stub_engine.pace = gate
    stub_engine.says("abc")
    key = await proxy.key()
    url = f"{base_of(proxy)}/v1beta/models/m:streamGenerateContent?alt=sse"
    body = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}
    async with httpx.AsyncClient(headers={"x-goog-api-key": key}) as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.post(url, json=body, timeout=httpx.Timeout(30.0, read=0.5))
        await gate.reached.wait()
        again = asyncio.create_task(client.post(url, json=body, timeout=30.0))
        gate.open()
        answer = await again
    chunks = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line]
    assert "".join(chunk["candidates"][0]["content"]["parts"][0]["text"] for chunk in chunks) == "abc"
    [turn] = await proxy.turns()
    assert (len(stub_engine.requests), turn.status) == (1, TurnStatus.DELIVERED)

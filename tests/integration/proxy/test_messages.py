"""The official Anthropic client against the proxy: what it is told, and what is recorded."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import pytest
from anthropic.types import Message
from proxy_fixtures import ProxyAtWork
from stub_engine import StubEngine, ids_of

from openforge.protos import BranchCause
from openforge.tokens import merge, rebuild

USER = {"role": "user", "content": "hi"}
TOOLS = [{"name": "bash", "description": "Run.", "input_schema": {"type": "object"}}]
ASKED: dict[str, Any] = {"model": "m", "max_tokens": 512, "tools": TOOLS}
THINKING = {"type": "enabled", "budget_tokens": 1024}


@asynccontextmanager
async def client_of(proxy: ProxyAtWork) -> AsyncIterator[anthropic.AsyncAnthropic]:
    key = await proxy.key(tokens=512)
    base = proxy.base_url().removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=base, api_key=key, max_retries=0, timeout=60.0) as client:
        yield client


def call_text(*arguments: str) -> str:
    calls = (f'<tool_call>\n{{"name": "bash", "arguments": {each}}}\n</tool_call>' for each in arguments)
    return "Doing.\n" + "\n".join(calls)


async def say(client: anthropic.AsyncAnthropic, streaming: bool, **asked: Any) -> Message:
    if not streaming:
        return await client.messages.create(**ASKED | asked)
    async with client.messages.stream(**ASKED | asked) as stream:
        return await stream.get_final_message()


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_conversation_with_parallel_calls_and_thinking_is_one_branch(
    proxy: ProxyAtWork, stub_engine: StubEngine, streaming: bool
) -> None:
    stub_engine.says(
        "<think>\nHow?\n</think>\n\n" + call_text('{"command":   "a"}', '{"command": "b"}'),
        call_text('{"command": '),
        "<think>\nAgain.\n</think>\n\n" + call_text('{"n": 1.0}'),
        "Done.",
    )
    messages: list[dict[str, Any]] = [USER]
    async with client_of(proxy) as client:
        for _ in range(4):
            told = await say(client, streaming, messages=messages, thinking=THINKING, system="Work.")
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": f"out of {block.input}"}
                for block in told.content
                if block.type == "tool_use"
            ]
            messages.append({"role": "assistant", "content": [block.to_dict() for block in told.content]})
            messages.append({"role": "user", "content": results[::-1]})
    first, second, third, last = (message["content"] for message in messages[1::2])
    assert [block["type"] for block in first] == ["thinking", "text", "tool_use", "tool_use"]
    assert (first[0]["thinking"], first[1]["text"]) == ("How?", "Doing.")
    assert second[1]["input"] == {"INVALID_JSON": '{"command":'}
    assert [block["type"] for block in third] == ["thinking", "text", "tool_use"]
    assert (last[0]["text"], told.stop_reason) == ("Done.", "end_turn")
    turns = await proxy.turns()
    assert [turn.cause for turn in turns] == [BranchCause.START] + [BranchCause.CONTINUED] * 3
    assert {turn.dialect for turn in turns} == {"messages"}
    merged = merge(rebuild(turns))
    assert (len(merged.sequences), merged.delivered_fraction, merged.extra_prefill_ratio) == (1, 1.0, 1.0)
    for earlier, later in zip(stub_engine.requests, stub_engine.requests[1:], strict=False):
        assert later.token_ids[: len(earlier.token_ids)] == earlier.token_ids
    assert told.usage.input_tokens == len(stub_engine.requests[-1].token_ids)
    assert told.usage.output_tokens == len(ids_of("Done.")) + 1


async def test_the_model_is_listed_and_counting_renders_the_prompt_that_a_call_would_have(
    proxy: ProxyAtWork, stub_engine: StubEngine
) -> None:
    stub_engine.says("<think>\nHm.\n</think>\n\nYes.")
    async with client_of(proxy) as client:
        told = await say(client, False, messages=[USER], thinking=THINKING)
        history: Any = [USER, {"role": "assistant", "content": told.content}, USER]
        counted = await client.messages.count_tokens(model="m", messages=history, tools=TOOLS)  # type: ignore[arg-type]
        again = await say(client, False, messages=history, thinking=THINKING)
        assert [model.id async for model in client.models.list()] == ["r"]
    assert counted.input_tokens == again.usage.input_tokens == len(stub_engine.requests[-1].token_ids)
    assert len(await proxy.turns()) == 2


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_cut_answer_and_a_stop_string_say_so(
    proxy: ProxyAtWork, stub_engine: StubEngine, streaming: bool
) -> None:
    stub_engine.script = lambda request: ids_of("abcSTOP")
    async with client_of(proxy) as client:
        cut = await say(client, streaming, messages=[USER], max_tokens=2)
        stub_engine.stop_reason = "STOP"
        stopped = await say(client, streaming, messages=[USER, USER], stop_sequences=["STOP"])
    assert (cut.stop_reason, cut.content[0].text) == ("max_tokens", "ab")  # type: ignore[union-attr]
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "STOP")
    assert stopped.content[0].text == "abc"  # type: ignore[union-attr]


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_prompt_that_is_too_long_is_told_in_the_words_at_which_harnesses_compact(
    proxy: ProxyAtWork, streaming: bool
) -> None:
    async with client_of(proxy) as client:
        with pytest.raises(
            anthropic.BadRequestError, match=r"prompt is too long: \d{4} tokens > 4096 maximum"
        ) as error:
            await say(client, streaming, messages=[{"role": "user", "content": "x" * 6000}])
    assert error.value.type == "invalid_request_error"


async def test_a_foreign_key_a_bad_request_and_the_end_have_their_own_errors(proxy: ProxyAtWork) -> None:
    async with client_of(proxy) as client:
        with pytest.raises(anthropic.AuthenticationError) as foreign:
            await say(client.with_options(api_key="other"), False, messages=[USER])
        assert foreign.value.type == "authentication_error"
        with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.role = 'king'"):
            await say(client, False, messages=[{"role": "king", "content": "x"}])
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.batches.list()
        await proxy.end()
        with pytest.raises(anthropic.ConflictError, match="has ended") as over:
            await say(client, True, messages=[USER])
        assert over.value.type == "conflict_error"


async def test_a_client_that_repeats_conflicts_is_told_not_to(proxy: ProxyAtWork) -> None:
    calls: list[object] = []

    async def noted(request: object) -> None:
        calls.append(request)

    async with (
        client_of(proxy) as client,
        anthropic.DefaultAsyncHttpxClient(event_hooks={"request": [noted]}) as http,
    ):
        await proxy.end()
        with pytest.raises(anthropic.ConflictError):
            await say(client.with_options(max_retries=2, http_client=http), False, messages=[USER])
    assert len(calls) == 1


async def test_an_engine_that_breaks_off_in_mid_stream_is_an_error_event(
    proxy: ProxyAtWork, stub_engine: StubEngine
) -> None:
    stub_engine.says("abcdef")
    stub_engine.break_after = 4

    async def wait_a_little(index: int) -> None:
        await asyncio.sleep(0.05)

    stub_engine.pace = wait_a_little
    async with client_of(proxy) as client:
        with pytest.raises(anthropic.APIStatusError, match="could not answer"):
            await say(client, True, messages=[USER])

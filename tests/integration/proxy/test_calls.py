"""Model calls of a real client library against the proxy: what it is told, and what is recorded."""

import asyncio
import json
from pathlib import Path

import httpx
import openai
import pytest
from proxy_fixtures import ProxyAtWork
from stub_engine import Gate, StubEngine, ids_of, stopped

from openforge.protos import BranchCause, FinishReason, TurnStatus, VersionSpan, unpack_ids, unpack_logprobs
from openforge.tokens import merge, rebuild

USER = {"role": "user", "content": "hi"}
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]


async def test_an_answer_is_recorded_token_for_token(proxy: ProxyAtWork, stub_engine: StubEngine) -> None:
    stub_engine.says("Hello world")
    client = await proxy.client()
    told = await client.chat.completions.create(model="m", messages=[USER], temperature=0.3)
    assert told.choices[0].message.content == "Hello world"
    assert (told.choices[0].finish_reason, told.model) == ("stop", "m")
    [turn] = await proxy.turns()
    sent = stub_engine.requests[0]
    assert (
        unpack_ids(turn.suffix)
        == sent.token_ids
        == [*ids_of("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")]
    )
    assert unpack_ids(turn.sampled) == stopped("Hello world")
    assert unpack_logprobs(turn.logprobs) == pytest.approx([-(i + 1) / 100 for i in range(len(stopped("Hello world")))])
    assert turn.versions == (VersionSpan(0, len(stopped("Hello world")), 0),)
    assert (turn.turn, turn.parent, turn.cause, turn.status) == (0, None, BranchCause.START, TurnStatus.DELIVERED)
    assert json.loads(turn.asked) == {"model": "m", "temperature": 0.3}
    assert (turn.sampling.temperature, sent.sampling_params.temperature) == (1.0, 1.0)
    assert told.usage is not None
    assert (told.usage.prompt_tokens, told.usage.completion_tokens) == (
        len(sent.token_ids),
        len(stopped("Hello world")),
    )


async def test_a_stream_tells_text_as_it_comes_and_its_end_only_when_the_turn_is_durable(
    proxy: ProxyAtWork, stub_engine: StubEngine
) -> None:
    gate = Gate(upto=3)
    stub_engine.pace = gate
    stub_engine.script = lambda request: stopped("abcdef")
    client = await proxy.client()
    stream = await client.chat.completions.create(
        model="m", messages=[USER], stream=True, stream_options={"include_usage": True}
    )
    chunks = aiter(stream)
    early = ""
    while len(early) < 3:
        early += (await anext(chunks)).choices[0].delta.content or ""
    assert early == "abc"
    assert await proxy.turns() == []
    gate.open()
    rest = [chunk async for chunk in chunks]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in rest if chunk.choices) == "def"
    assert [chunk.choices[0].finish_reason for chunk in rest if chunk.choices][-1] == "stop"
    assert rest[-1].usage is not None
    assert rest[-1].usage.completion_tokens == len(stopped("abcdef"))
    [turn] = await proxy.turns()
    assert turn.status is TurnStatus.DELIVERED


def call_text(command: str) -> str:
    return f'Doing.\n<tool_call>\n{{"name": "bash", "arguments": {{"command":   "{command}"}}}}\n</tool_call>'


@pytest.mark.parametrize("streaming", [False, True])
async def test_five_turns_with_tools_are_one_branch_token_by_token(
    proxy: ProxyAtWork, stub_engine: StubEngine, streaming: bool
) -> None:
    stub_engine.says(*(call_text(f"echo {step}") for step in range(4)), "Done.")
    client = await proxy.client()
    messages: list[dict[str, object]] = [{"role": "system", "content": "Work."}, USER]
    for _ in range(5):
        message = await say(client, messages, streaming)
        calls = message.get("tool_calls") or []
        messages.append(message)
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": "out\n"} for call in calls]  # type: ignore[index,attr-defined]
    assert messages[-1]["content"] == "Done."
    assert len({message["tool_call_id"] for message in messages if message["role"] == "tool"}) == 4
    turns = await proxy.turns()
    assert [turn.cause for turn in turns] == [BranchCause.START] + [BranchCause.CONTINUED] * 4
    merged = merge(rebuild(turns))
    assert (len(merged.sequences), merged.delivered_fraction, merged.extra_prefill_ratio) == (1, 1.0, 1.0)
    for rebuilt, request in zip(rebuild(turns), stub_engine.requests, strict=True):
        assert rebuilt.prompt_ids() == request.token_ids
    for earlier, later in zip(stub_engine.requests, stub_engine.requests[1:], strict=False):
        assert later.token_ids[: len(earlier.token_ids)] == earlier.token_ids
    assert all(not turn.tools for turn in turns[1:])
    assert [json.loads(turn.messages)[0]["role"] for turn in turns] == ["system"] + ["tool"] * 4


async def say(client: openai.AsyncOpenAI, messages: list[dict[str, object]], streaming: bool) -> dict[str, object]:
    if not streaming:
        told = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)  # type: ignore[call-overload]
        return dict(told.choices[0].message.model_dump(exclude_none=True))
    content = ""
    calls: dict[int, dict[str, object]] = {}
    stream = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS, stream=True)  # type: ignore[call-overload]
    async for chunk in stream:
        delta = chunk.choices[0].delta
        content += delta.content or ""
        for part in delta.tool_calls or []:
            call = calls.setdefault(
                part.index, {"id": part.id, "type": "function", "name": part.function.name, "text": ""}
            )
            call["text"] = str(call["text"]) + (part.function.arguments or "")
    message: dict[str, object] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["text"]}}
            for call in calls.values()
        ]
    return message


async def test_sampled_tokens_are_never_tokenised_again(proxy: ProxyAtWork, stub_engine: StubEngine) -> None:
    """The answer's ids are one byte each, which no tokenizer would give for this text."""
    text = "the assistant"
    bytewise = [token for letter in text for token in ids_of(letter)]
    assert bytewise != ids_of(text)
    stub_engine.script = lambda request: [*bytewise, 2]
    client = await proxy.client()
    first = await client.chat.completions.create(model="m", messages=[USER])
    assert first.choices[0].message.content == text
    await client.chat.completions.create(
        model="m", messages=[USER, {"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
    )
    prompt = stub_engine.requests[1].token_ids
    start = len(stub_engine.requests[0].token_ids)
    assert prompt[start : start + len(bytewise) + 1] == [*bytewise, 2]


async def test_a_cut_answer_is_told_as_length_and_closed_in_the_next_prompt(
    proxy: ProxyAtWork, stub_engine: StubEngine
) -> None:
    stub_engine.script = lambda request: ids_of("x" * 500)
    client = await proxy.client(tokens=5)
    told = await client.chat.completions.create(model="m", messages=[USER], max_tokens=32000)
    assert told.choices[0].finish_reason == "length"
    assert stub_engine.requests[0].sampling_params.max_tokens == 5
    await client.chat.completions.create(
        model="m",
        messages=[USER, {"role": "assistant", "content": told.choices[0].message.content}, USER],  # type: ignore[list-item]
    )
    first, second = await proxy.turns()
    assert (first.finish, second.cause) == (FinishReason.LENGTH, BranchCause.CONTINUED)
    assert unpack_ids(second.suffix)[0] == 2


async def test_a_smaller_limit_and_stop_strings_of_the_harness_are_honoured(
    proxy: ProxyAtWork, stub_engine: StubEngine
) -> None:
    stub_engine.script = lambda request: ids_of("abcSTOP")
    stub_engine.stop_reason = "STOP"
    client = await proxy.client()
    told = await client.chat.completions.create(model="m", messages=[USER], max_tokens=9, stop=["STOP"])
    assert told.choices[0].message.content == "abc"
    assert stub_engine.requests[0].sampling_params.max_tokens == 9
    assert stub_engine.requests[0].sampling_params.stop == ["STOP"]
    [turn] = await proxy.turns()
    assert unpack_ids(turn.sampled) == ids_of("abcSTOP")


async def test_weights_that_change_during_an_answer_are_recorded_span_by_span(
    proxy: ProxyAtWork, stub_engine: StubEngine
) -> None:
    async def change(index: int) -> None:
        stub_engine.version = "4" if index < 2 else "5"

    stub_engine.pace = change
    stub_engine.script = lambda request: stopped("abcd")
    client = await proxy.client()
    await client.chat.completions.create(model="m", messages=[USER])
    [turn] = await proxy.turns()
    assert turn.versions == (VersionSpan(0, 2, 4), VersionSpan(2, 3, 5))


async def test_a_rewritten_history_is_a_branch_that_shares_its_beginning(
    proxy: ProxyAtWork, stub_engine: StubEngine
) -> None:
    client = await proxy.client()
    system = {"role": "system", "content": "A system text that both share."}
    await client.chat.completions.create(model="m", messages=[system, USER])
    await client.chat.completions.create(model="m", messages=[system, {"role": "user", "content": "other"}])
    first, second = await proxy.turns()
    assert (second.cause, second.parent, second.kept) == (BranchCause.REWRITTEN, 0, 1)
    assert 10 < second.prefix < len(stub_engine.requests[0].token_ids)
    assert [rebuilt.prompt_ids() for rebuilt in rebuild([first, second])] == [r.token_ids for r in stub_engine.requests]


async def test_other_tools_are_a_branch(proxy: ProxyAtWork, stub_engine: StubEngine) -> None:
    client = await proxy.client()
    await client.chat.completions.create(model="m", messages=[USER])
    history = [USER, {"role": "assistant", "content": "ok"}, USER]
    await client.chat.completions.create(model="m", messages=history, tools=TOOLS)  # type: ignore[call-overload]
    _, second = await proxy.turns()
    assert second.cause is BranchCause.TOOLS_CHANGED
    assert json.loads(second.tools)[0]["name"] == "bash"


async def test_models_are_listed_and_stubs_answer(proxy: ProxyAtWork) -> None:
    client = await proxy.client()
    assert [model.id async for model in await client.models.list()] == ["r"]
    async with httpx.AsyncClient(base_url=proxy.settings.proxy_url) as plain:
        assert (await plain.head("/")).status_code == 200
        assert (await plain.get("/ep/e-0.0/")).status_code == 200
        assert (await plain.get("/nowhere")).status_code == 404
        assert (await plain.get("/ep/e-0.0/v1/nowhere")).status_code == 404
        for probe in ("", "/api/hello", "/v1/models", "/v1/chat/completions"):
            assert (await plain.head(f"/ep/e-0.0{probe}")).status_code == 200
        upgrade = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
        assert (await plain.get("/ep/e-0.0/v1/responses", headers=upgrade)).status_code == 426


async def test_a_key_in_the_query_opens_its_attempt_and_no_other(proxy: ProxyAtWork) -> None:
    key = await proxy.key()
    async with httpx.AsyncClient() as plain:
        assert (await plain.get(f"{proxy.base_url()}/models", params={"key": key})).status_code == 200
        assert (await plain.get(f"{proxy.base_url('e-1')}/models", params={"key": key})).status_code == 401


async def test_a_doubled_v1_is_tolerated(proxy: ProxyAtWork) -> None:
    key = await proxy.key()
    async with openai.AsyncOpenAI(base_url=proxy.base_url() + "/v1", api_key=key, max_retries=0) as client:
        told = await client.chat.completions.create(model="m", messages=[USER])
    assert told.choices[0].message.content == "ok"


async def test_the_synchronous_client_works_too(proxy: ProxyAtWork) -> None:
    key = await proxy.key()

    def talk() -> tuple[str | None, str]:
        with openai.OpenAI(base_url=proxy.base_url(), api_key=key, max_retries=0) as client:
            whole = client.chat.completions.create(model="m", messages=[USER])
            streamed = client.chat.completions.create(model="m", messages=[USER, USER], stream=True)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
        return whole.choices[0].message.content, text

    assert await asyncio.to_thread(talk) == ("ok", "ok")


async def test_the_unix_socket_is_open_to_every_user(proxy: ProxyAtWork) -> None:
    path = Path(proxy.settings.sockets) / "proxy.sock"
    assert path.stat().st_mode & 0o777 == 0o666
    key = await proxy.key()
    transport = httpx.AsyncHTTPTransport(uds=str(path))
    async with httpx.AsyncClient(transport=transport, base_url="http://proxy/ep/e-0.0/v1") as client:
        answer = await client.post(
            "/chat/completions",
            json={"model": "m", "messages": [USER]},
            headers={"Authorization": f"Bearer {key}"},
        )
    assert answer.json()["choices"][0]["message"]["content"] == "ok"


async def test_attempts_at_once_do_not_mix(proxy: ProxyAtWork, stub_engine: StubEngine) -> None:
    stub_engine.script = lambda request: stopped(f"{len(request.token_ids)}")
    clients = [await proxy.client(f"e-{index}") for index in range(6)]

    async def three_turns(index: int) -> None:
        messages: list[dict[str, object]] = [{"role": "user", "content": "x" * index}]
        for _ in range(3):
            messages.append(await say_plain(clients[index], messages))
            messages.append(USER)  # type: ignore[arg-type]

    await asyncio.gather(*(three_turns(index) for index in range(6)))
    for index in range(6):
        turns = await proxy.turns(f"e-{index}")
        assert [turn.cause for turn in turns] == [BranchCause.START, BranchCause.CONTINUED, BranchCause.CONTINUED]


async def say_plain(client: openai.AsyncOpenAI, messages: list[dict[str, object]]) -> dict[str, object]:
    told = await client.chat.completions.create(model="m", messages=messages)  # type: ignore[arg-type]
    return {"role": "assistant", "content": told.choices[0].message.content}


async def test_a_slow_stream_shows_signs_of_life_until_its_first_token(
    idle_proxy: ProxyAtWork, stub_engine: StubEngine
) -> None:
    idle_proxy.set(proxy_keep_alive_s=0.05)
    await idle_proxy.start()
    gate = Gate()
    stub_engine.pace = gate
    key = await idle_proxy.key()
    body = {"model": "m", "messages": [USER], "stream": True}
    async with (
        httpx.AsyncClient(headers={"authorization": f"Bearer {key}"}) as http,
        http.stream("POST", f"{idle_proxy.base_url()}/chat/completions", json=body) as answer,
    ):
        lines = answer.aiter_lines()
        while not (await anext(lines)).startswith(":"):
            pass
        gate.open()
        told = [json.loads(line[6:]) async for line in lines if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in told) == "ok"


@pytest.mark.parametrize("keeps", [True, False])
async def test_reasoning_is_told_apart_and_continues_the_branch_where_it_comes_back(
    proxy: ProxyAtWork, stub_engine: StubEngine, keeps: bool
) -> None:
    stub_engine.says("<think>\nHm.\n</think>\n\nYes.")
    client = await proxy.client()
    stream = await client.chat.completions.create(model="m", messages=[USER], stream=True)
    deltas = [chunk.choices[0].delta async for chunk in stream]
    reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    content = "".join(delta.content or "" for delta in deltas)
    assert (reasoning, content) == ("Hm.", "Yes.")
    echo = {"role": "assistant", "content": content} | ({"reasoning_content": " Hm."} if keeps else {})
    whole = await client.chat.completions.create(model="m", messages=[USER, echo, USER])  # type: ignore[list-item]
    assert whole.choices[0].message.reasoning_content == "Hm."  # type: ignore[attr-defined]
    first, second = await proxy.turns()
    assert second.cause is (BranchCause.CONTINUED if keeps else BranchCause.REASONING_DROPPED)
    assert json.loads(first.reply)["reasoning"] == "Hm."


CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "%s"}}\n</tool_call>'


@pytest.mark.parametrize("streaming", [False, True])
async def test_an_answer_that_may_make_one_call_ends_with_it(
    proxy: ProxyAtWork, stub_engine: StubEngine, streaming: bool
) -> None:
    """What the harness is told is all that was sampled, and the next prompt goes on from it."""
    stub_engine.says("Doing.\n" + CALL % "ls" + "\n" + CALL % "pwd", "Done.")
    client = await proxy.client()
    asked = {"model": "m", "tools": TOOLS, "parallel_tool_calls": False}
    if streaming:
        async with client.chat.completions.stream(**asked, messages=[USER]) as stream:
            told = (await stream.get_final_completion()).choices[0]
    else:
        told = (await client.chat.completions.create(**asked, messages=[USER])).choices[0]
    assert (told.finish_reason, told.message.content) == ("tool_calls", "Doing.")
    [call] = told.message.tool_calls or []
    assert json.loads(call.function.arguments) == {"command": "ls"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "a"}
    await client.chat.completions.create(**asked, messages=[USER, told.message.model_dump(exclude_none=True), result])
    first, second = await proxy.turns()
    sampled = ids_of("Doing.\n" + CALL % "ls")
    assert (unpack_ids(first.sampled), first.sampling.stop, first.guided) == (sampled, ("</tool_call>",), False)
    assert second.cause is BranchCause.CONTINUED
    assert stub_engine.requests[1].token_ids[: len(stub_engine.requests[0].token_ids) + len(sampled) + 1] == [
        *stub_engine.requests[0].token_ids,
        *sampled,
        stopped("")[0],
    ]
    assert merge(rebuild([first, second])).delivered_fraction == 1.0


async def test_functions_of_old_make_one_call(proxy: ProxyAtWork, stub_engine: StubEngine) -> None:
    stub_engine.says(CALL % "ls" + "\n" + CALL % "pwd", "Done.")
    client = await proxy.client()
    asked = {"model": "m", "functions": [TOOLS[0]["function"]]}
    told = (await client.chat.completions.create(**asked, messages=[USER])).choices[0]
    assert told.finish_reason == "function_call"
    assert told.message.function_call is not None
    result = {"role": "function", "name": "bash", "content": "a"}
    await client.chat.completions.create(**asked, messages=[USER, told.message.model_dump(exclude_none=True), result])
    turns = await proxy.turns()
    assert unpack_ids(turns[0].sampled) == ids_of(CALL % "ls")
    assert turns[1].cause is BranchCause.CONTINUED


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_stop_string_ends_reasoning_too_and_is_not_told(
    proxy: ProxyAtWork, stub_engine: StubEngine, streaming: bool
) -> None:
    stub_engine.says("<think>\nLet me see: STOP here\n</think>\n\nDone.")
    client = await proxy.client()
    asked = {"model": "m", "messages": [USER], "stop": ["STOP"]}
    if streaming:
        deltas = [chunk.choices[0].delta async for chunk in await client.chat.completions.create(**asked, stream=True)]
        told = "".join(getattr(delta, "reasoning_content", "") or "" for delta in deltas)
    else:
        told = (await client.chat.completions.create(**asked)).choices[0].message.reasoning_content
    assert told.rstrip() == "Let me see:"
    [turn] = await proxy.turns()
    assert json.loads(turn.reply)["reasoning"].rstrip() == "Let me see:"
    assert unpack_ids(turn.sampled)[-1] == ids_of("STOP")[-1]


async def test_tools_that_are_allowed_are_asked_of_the_engine(proxy: ProxyAtWork, stub_engine: StubEngine) -> None:
    client = await proxy.client()
    tools = [*TOOLS, {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}]
    named = [{"type": "function", "function": {"name": "bash"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": named}}
    await client.chat.completions.create(model="m", messages=[USER], tools=tools, tool_choice=choice)
    wanted = stub_engine.requests[0].sampling_params.structured_outputs
    assert wanted is not None
    assert wanted.grammar is not None
    assert "bash" in wanted.grammar
    assert "other" not in wanted.grammar

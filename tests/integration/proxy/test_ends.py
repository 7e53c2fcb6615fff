"""Keys, limits, the end of an attempt, and the end of the proxy itself."""

import asyncio
import json
import signal
from pathlib import Path

import httpx
import msgspec
import openai
import pytest
from proxy_fixtures import ProxyAtWork, started_process
from stub_engine import Gate, StubEngine, stopped

from openforge.bus.server import NatsServer
from openforge.protos import (
    KEY_BUCKET,
    AttemptKey,
    BranchCause,
    EndReason,
    EpisodeEnded,
    TurnStatus,
    key_entry,
    unpack_ids,
)
from openforge.proxy.listening import listen
from openforge.tokens import merge, rebuild

USER = {"role": "user", "content": "hi"}
BODY = {"model": "m", "messages": [USER]}


async def post(url: str, headers: dict[str, str], body: object = BODY, **more: object) -> httpx.Response:
    async with httpx.AsyncClient(timeout=30) as client:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await client.post(f"{url}/chat/completions", content=content, headers=headers)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("header", ["x-api-key", "x-goog-api-key"])
async def test_the_key_may_come_in_any_dialects_header(proxy: ProxyAtWork, header: str) -> None:
    assert (await post(proxy.base_url(), {header: await proxy.key()})).status_code == 200


async def test_a_key_opens_its_own_attempt_and_nothing_else(proxy: ProxyAtWork, stub_engine: StubEngine) -> None:
    key = await proxy.key("e-0", 0)
    await proxy.key("e-0", 1)
    wrong = [
        await post(proxy.base_url("e-0", 1), bearer(key)),
        await post(proxy.base_url("e-1"), bearer(key)),
        await post(proxy.base_url(), bearer("of-guess")),
        await post(proxy.base_url(), {"Authorization": f"Basic {key}"}),
        await post(proxy.base_url(), {}),
    ]
    assert [answer.status_code for answer in wrong] == [401] * 5
    assert {answer.json()["error"]["code"] for answer in wrong} == {"invalid_api_key"}
    assert stub_engine.requests == []


async def test_the_openai_client_sees_an_authentication_error(proxy: ProxyAtWork) -> None:
    async with openai.AsyncOpenAI(base_url=proxy.base_url(), api_key="nope", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.chat.completions.create(model="m", messages=[USER])  # type: ignore[list-item]


async def test_an_expired_key_is_refused_as_ended(proxy: ProxyAtWork) -> None:
    answer = await post(proxy.base_url(), bearer(await proxy.key(lives_s=-1)))
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "attempt_ended")


async def test_turns_are_limited(proxy: ProxyAtWork) -> None:
    key = await proxy.key(turns=2)
    answers = [await post(proxy.base_url(), bearer(key)) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 400]
    assert "2 model calls" in answers[2].json()["error"]["message"]


async def test_a_prompt_beyond_the_window_is_a_context_overflow(proxy: ProxyAtWork, stub_engine: StubEngine) -> None:
    key = await proxy.key()
    answer = await post(proxy.base_url(), bearer(key), {"messages": [{"role": "user", "content": "xyz " * 3000}]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert answer.json()["error"]["message"].startswith("This model's maximum context length is 4096 tokens. However")
    assert stub_engine.requests == []


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'{"messages": "\xff\xfe"}', b'{"messages": [{"role": 1}]}', b"[" * 100_000, b'{"messages":[]}'],
)
async def test_nonsense_is_refused_in_the_dialects_shape(proxy: ProxyAtWork, body: bytes) -> None:
    answer = await post(proxy.base_url(), bearer(await proxy.key()), body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_a_giant_body_is_refused_whether_it_says_so_or_not(idle_proxy: ProxyAtWork) -> None:
    idle_proxy.set(proxy_body_mb=1)
    await idle_proxy.start()
    key = await idle_proxy.key()

    async def pieces() -> object:
        for _ in range(40):
            yield b" " * (1 << 16)

    for content in (b" " * (2 << 20), pieces()):
        async with httpx.AsyncClient() as client:
            answer = await client.post(
                f"{idle_proxy.base_url()}/chat/completions",
                content=content,
                headers=bearer(key),  # type: ignore[arg-type]
            )
        assert (answer.status_code, "bytes" in answer.json()["error"]["message"]) == (400, True)


async def test_after_the_end_nothing_is_taken_and_the_seal_says_what_there_was(
    proxy: ProxyAtWork, stub_engine: StubEngine
) -> None:
    key = await proxy.key()
    for _ in range(2):
        await post(proxy.base_url(), bearer(key))
    sealed = await proxy.end()
    assert (sealed.turns, sealed.refused, sealed.engine_failures) == ((0, 1), 0, 0)
    answer = await post(proxy.base_url(), bearer(key))
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "attempt_ended")
    assert len(stub_engine.requests) == 2


async def test_an_attempt_without_calls_is_sealed_too(proxy: ProxyAtWork) -> None:
    assert (await proxy.end("e-7")).turns == ()


async def test_the_end_calls_off_what_is_being_sampled(proxy: ProxyAtWork, stub_engine: StubEngine) -> None:
    gate = Gate(upto=2)
    stub_engine.pace = gate
    stub_engine.script = lambda request: stopped("abcdef")
    answer = asyncio.create_task(post(proxy.base_url(), bearer(await proxy.key())))
    await gate.reached.wait()
    sealed = await proxy.end()
    assert sealed.turns == (0,)
    [turn] = await proxy.turns()
    assert (turn.status, len(unpack_ids(turn.sampled))) == (TurnStatus.ABORTED, 2)
    assert (await answer).status_code == 409


async def test_a_call_that_the_end_finds_without_a_token_is_counted_as_unanswered(
    proxy: ProxyAtWork, stub_engine: StubEngine
) -> None:
    gate = Gate()
    stub_engine.pace = gate
    answer = asyncio.create_task(post(proxy.base_url(), bearer(await proxy.key())))
    await gate.reached.wait()
    sealed = await proxy.end()
    assert (sealed.turns, sealed.unanswered, sealed.engine_failures) == ((), 1, 0)
    assert (await answer).status_code == 409


async def test_a_restarted_proxy_goes_on_token_by_token(proxy: ProxyAtWork, stub_engine: StubEngine) -> None:
    stub_engine.script = lambda request: [*(token for letter in "the assistant" for token in stopped(letter)[:-1]), 2]
    key = await proxy.key()
    messages: list[dict[str, str]] = [USER]
    for step in range(4):
        answer = (await post(proxy.base_url(), bearer(key), {"model": "m", "messages": messages})).json()
        messages += [{"role": "assistant", "content": answer["choices"][0]["message"]["content"]}, USER]
        if step == 1:
            await proxy.stop()
            await proxy.start()
    turns = await proxy.turns()
    assert [turn.cause for turn in turns] == [BranchCause.START] + [BranchCause.CONTINUED] * 3
    assert len(merge(rebuild(turns)).sequences) == 1


async def test_an_end_that_was_told_while_the_proxy_was_away_is_sealed_when_it_is_back(proxy: ProxyAtWork) -> None:
    key = await proxy.key()
    await post(proxy.base_url(), bearer(key))
    await proxy.stop()
    await proxy.bus.tell(EpisodeEnded(run="r", episode="e-0", attempt=0, reason=EndReason.FINISHED))
    await proxy.start()
    assert (await proxy.sealed()).turns == (0,)
    assert (await post(proxy.base_url(), bearer(key))).status_code == 409


async def test_sigterm_lets_open_calls_end(proxy: ProxyAtWork, stub_engine: StubEngine) -> None:
    gate = Gate()
    stub_engine.pace = gate
    answer = asyncio.create_task(post(proxy.base_url(), bearer(await proxy.key())))
    await gate.reached.wait()
    stopping = asyncio.create_task(proxy.stop())
    await asyncio.sleep(0.2)
    gate.open()
    assert (await answer).status_code == 200
    await stopping


async def test_a_killed_proxy_loses_no_recorded_turn_and_repeats_what_it_had_told(
    idle_proxy: ProxyAtWork, stub_engine: StubEngine, tmp_path: Path
) -> None:
    """The process dies in the middle of a stream; the next one takes up where the record ends."""
    stub_engine.says("first", "second")
    key = await idle_proxy.key()
    process = await started_process(idle_proxy, tmp_path)
    try:
        told = (await post(idle_proxy.base_url(), bearer(key))).json()["choices"][0]["message"]
        gate = Gate(upto=2)
        stub_engine.pace = gate
        history = {"model": "m", "messages": [USER, told, USER], "stream": True}
        broken = asyncio.create_task(post(idle_proxy.base_url(), bearer(key), history))
        await gate.reached.wait()
    finally:
        process.send_signal(signal.SIGKILL)
        await process.wait()
    with pytest.raises(httpx.HTTPError):
        await broken
    stub_engine.pace = None
    stub_engine.says("second")
    await idle_proxy.start()
    answer = await post(idle_proxy.base_url(), bearer(key), history | {"stream": False})
    assert answer.json()["choices"][0]["message"]["content"] == "second"
    turns = await idle_proxy.turns()
    assert [turn.cause for turn in turns] == [BranchCause.START, BranchCause.CONTINUED]
    again = await post(idle_proxy.base_url(), bearer(key))
    assert again.json()["choices"][0]["message"]["content"] == "second"
    assert (await idle_proxy.turns())[-1].cause is BranchCause.RESAMPLED


async def test_a_turn_told_by_a_proxy_that_died_before_its_answer_went_out_is_replayed(
    proxy: ProxyAtWork, stub_engine: StubEngine
) -> None:
    stub_engine.says("one", "two")
    key = await proxy.key()
    first = (await post(proxy.base_url(), bearer(key))).json()
    await proxy.stop()
    await proxy.start()
    again = (await post(proxy.base_url(), bearer(key))).json()
    assert again["choices"] == first["choices"]
    assert len(await proxy.turns()) == len(stub_engine.requests) == 1


async def test_calls_that_outlive_the_drain_time_are_told_to_repeat(
    proxy: ProxyAtWork, stub_engine: StubEngine
) -> None:
    gate = Gate(upto=1)
    stub_engine.pace = gate
    answer = asyncio.create_task(post(proxy.base_url(), bearer(await proxy.key())))
    await gate.reached.wait()
    await proxy.stop()
    assert (await answer).status_code == 500
    [turn] = await proxy.turns()
    assert turn.status is TurnStatus.ABANDONED


async def test_calls_that_come_between_the_end_and_the_seal_are_counted(
    proxy: ProxyAtWork, stub_engine: StubEngine
) -> None:
    key = await proxy.key()
    await post(proxy.base_url(), bearer(key))
    bucket = await proxy.bus.bucket(KEY_BUCKET)
    entry = AttemptKey.decode((await bucket.get(key_entry("r", key))).value or b"")
    await bucket.put(key_entry("r", key), msgspec.structs.replace(entry, ended=True).encode())
    await proxy.stop()
    await proxy.start()
    answers = [await post(proxy.base_url(), bearer(key)) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [409, 409]
    assert (await proxy.end()).turns == (0,)


async def test_an_attempt_whose_record_contradicts_itself_is_sealed_as_it_is(proxy: ProxyAtWork) -> None:
    key = await proxy.key()
    await post(proxy.base_url(), bearer(key))
    [turn] = await proxy.turns()
    await proxy.bus.tell(msgspec.structs.replace(turn, turn=1, parent=7, prefix=3))
    await proxy.stop()
    await proxy.start()
    assert (await post(proxy.base_url(), bearer(key))).status_code == 409
    assert (await proxy.end()).turns == (0, 1)


async def test_a_bus_that_restarts_in_the_middle_costs_nothing(
    proxy: ProxyAtWork, stub_engine: StubEngine, nats_server: NatsServer
) -> None:
    gate = Gate()
    stub_engine.pace = gate
    answer = asyncio.create_task(post(proxy.base_url(), bearer(await proxy.key())))
    await gate.reached.wait()
    await nats_server.kill()
    gate.open()
    await asyncio.sleep(0.3)
    assert not answer.done()
    await nats_server.start()
    assert (await answer).status_code == 200
    assert len(await proxy.turns()) == 1
    assert (await proxy.end()).turns == (0,)


async def test_an_answer_that_was_told_when_its_harness_had_left_is_not_taken_for_a_used_one(
    proxy: ProxyAtWork, stub_engine: StubEngine, nats_server: NatsServer
) -> None:
    answer = asyncio.create_task(post(proxy.base_url(), bearer(await proxy.key())))
    stub_engine.pace = gate = Gate()
    await gate.reached.wait()
    await nats_server.kill()
    gate.open()
    while not stub_engine.finished:
        await asyncio.sleep(0.02)
    answer.cancel()
    await asyncio.wait([answer])
    await asyncio.sleep(0.2)
    await nats_server.start()
    [turn] = await proxy.turns_when(1)
    sealed = await proxy.end()
    assert (turn.status, sealed.turns, sealed.orphaned) == (TurnStatus.DELIVERED, (0,), (0,))
    assert merge(rebuild([turn]), orphaned=sealed.orphaned).sequences == ()


async def test_what_was_read_is_in_the_record_and_what_a_proxy_that_went_did_not_tell_is_not_taken_for_read(
    proxy: ProxyAtWork, stub_engine: StubEngine
) -> None:
    """A harness that makes a new prompt for each call: nothing goes on from its answers, so no history shows them."""
    key = bearer(await proxy.key())
    for question in ("one", "two", "three"):
        body = {"model": "m", "messages": [{"role": "user", "content": question}]}
        assert (await post(proxy.base_url(), key, body)).status_code == 200
    await proxy.stop()
    await proxy.start()
    body = {"model": "m", "messages": [{"role": "user", "content": "four"}]}
    assert (await post(proxy.base_url(), key, body)).status_code == 200
    assert [turn.read for turn in await proxy.turns()] == [(), (0,), (1,), ()]
    sealed = await proxy.end()
    assert (sealed.turns, sealed.orphaned) == ((0, 1, 2, 3), (2,))


async def test_that_an_answer_was_read_goes_without_saying_where_the_harness_goes_on_from_it(
    proxy: ProxyAtWork,
) -> None:
    key = bearer(await proxy.key())
    messages = [USER]
    for _ in range(3):
        answer = await post(proxy.base_url(), key, {"model": "m", "messages": messages})
        messages += [answer.json()["choices"][0]["message"], USER]
    assert [turn.read for turn in await proxy.turns()] == [(), (), ()]
    assert (await proxy.end()).orphaned == ()


async def test_requests_that_cannot_be_read_are_counted(proxy: ProxyAtWork) -> None:
    key = await proxy.key()
    for body in (b"{", {"messages": [USER] * 10_001}):
        assert (await post(proxy.base_url(), bearer(key), body)).status_code == 400
    assert (await post(proxy.base_url(), bearer(key))).status_code == 200
    assert (await proxy.end()).malformed == 2


async def test_a_key_opens_model_calls_and_nothing_else(proxy: ProxyAtWork) -> None:
    headers = bearer(await proxy.key())
    paths = ("admin", "metrics", "health", "state", "sessions", "reward", "keys", "turns", "v1/runs", "v1/episodes")
    async with httpx.AsyncClient(base_url=proxy.settings.proxy_url, headers=headers) as client:
        for path in paths:
            for root in ("/", "/ep/e-0.0/"):
                for method in ("GET", "POST", "PUT", "DELETE", "PATCH"):
                    assert (await client.request(method, root + path)).status_code == 404, (method, root + path)


async def test_a_taken_port_is_named(idle_proxy: ProxyAtWork, stub_engine: StubEngine) -> None:
    idle_proxy.set(proxy_url=stub_engine.url)
    with pytest.raises(ValueError, match=r"OPENFORGE_PROXY_URL = .* cannot be listened on"):
        listen(idle_proxy.settings)


async def test_clients_are_told_what_is_worth_a_repeat(idle_proxy: ProxyAtWork, stub_engine: StubEngine) -> None:
    """The official client repeats a 409 of its own accord, and does as the header says."""
    idle_proxy.set(engine_patience_s=0.1)
    await idle_proxy.start()
    client = (await idle_proxy.client()).with_options(max_retries=1)
    stub_engine.fail = 100
    with pytest.raises(openai.InternalServerError) as failed:
        await client.chat.completions.create(model="m", messages=[USER])
    assert failed.value.response.headers["x-should-retry"] == "true"
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(model="m", messages=[])
    assert refused.value.response.headers["x-should-retry"] == "false"
    sealing = asyncio.create_task(idle_proxy.end())
    await sealing
    asked = len(stub_engine.requests)
    calls = 0

    async def count(request: httpx.Request) -> None:
        nonlocal calls
        calls += 1

    async with httpx.AsyncClient(event_hooks={"request": [count]}) as http:
        counted = client.with_options(http_client=http, max_retries=2)
        with pytest.raises(openai.ConflictError):
            await counted.chat.completions.create(model="m", messages=[USER])
    assert (calls, len(stub_engine.requests)) == (1, asked)

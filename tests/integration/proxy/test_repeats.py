"""Harnesses that go away, come back and ask again; engines that break off."""

import asyncio

import httpx
import openai
import pytest
from proxy_fixtures import ProxyAtWork
from stub_engine import Gate, StubEngine, ids_of, stopped

from openforge.protos import BranchCause, Dropped, FinishReason, TurnStatus, unpack_ids
from openforge.tokens import merge, rebuild

USER = {"role": "user", "content": "hi"}
BODY = {"model": "m", "messages": [USER]}


async def post(proxy: ProxyAtWork, key: str, **changes: object) -> httpx.Response:
    async with httpx.AsyncClient(timeout=30) as client:
        return await client.post(
            f"{proxy.base_url()}/chat/completions",
            json={**BODY, **changes},
            headers={"Authorization": f"Bearer {key}"},
        )


async def leave(proxy: ProxyAtWork, key: str, gate: Gate) -> None:
    """Ask, and go away while the engine is at it."""
    asking = asyncio.create_task(post(proxy, key))
    await gate.reached.wait()
    asking.cancel()
    await asyncio.wait([asking])
    await asyncio.sleep(0.1)


async def test_a_repeat_joins_the_call_whose_client_went_away(proxy: ProxyAtWork, stub_engine: StubEngine) -> None:
    gate = Gate()
    stub_engine.pace = gate
    stub_engine.says("only once")
    key = await proxy.key()
    await leave(proxy, key, gate)
    repeat = asyncio.create_task(post(proxy, key))
    await asyncio.sleep(0.2)
    gate.open()
    assert (await repeat).json()["choices"][0]["message"]["content"] == "only once"
    [turn] = await proxy.turns()
    assert (turn.status, len(stub_engine.requests)) == (TurnStatus.DELIVERED, 1)


async def test_a_repeat_gets_the_sample_in_the_form_that_it_asks_for(
    proxy: ProxyAtWork, stub_engine: StubEngine
) -> None:
    gate = Gate(upto=2)
    stub_engine.pace = gate
    stub_engine.says("streamed, then whole")
    key = await proxy.key()
    async with (
        httpx.AsyncClient() as client,
        client.stream(
            "POST",
            f"{proxy.base_url()}/chat/completions",
            json={**BODY, "stream": True},
            headers={"Authorization": f"Bearer {key}"},
        ) as stream,
    ):
        async for line in stream.aiter_lines():
            if '"content":"s' in line:
                break
    repeat = asyncio.create_task(post(proxy, key))
    await asyncio.sleep(0.1)
    gate.open()
    assert (await repeat).json()["choices"][0]["message"]["content"] == "streamed, then whole"
    assert len(await proxy.turns()) == len(stub_engine.requests) == 1


async def test_a_call_that_nobody_comes_back_for_is_abandoned_after_the_grace_time(
    idle_proxy: ProxyAtWork, stub_engine: StubEngine
) -> None:
    idle_proxy.set(proxy_grace_s=0.3)
    await idle_proxy.start()
    gate = Gate(upto=2)
    stub_engine.pace = gate
    stub_engine.script = lambda request: stopped("abcdef")
    await leave(idle_proxy, await idle_proxy.key(), gate)
    [turn] = await idle_proxy.turns_when(1)
    assert (turn.status, turn.finish) == (TurnStatus.ABANDONED, FinishReason.ABORT)
    assert unpack_ids(turn.sampled) == ids_of("ab")
    assert sum(span.length for span in turn.versions) == 2
    async with asyncio.timeout(5):
        while not stub_engine.called_off:
            await asyncio.sleep(0.02)


async def test_a_call_that_had_no_token_is_unanswered_until_its_repeat_has_an_answer(
    idle_proxy: ProxyAtWork, stub_engine: StubEngine
) -> None:
    idle_proxy.set(proxy_grace_s=0.1)
    await idle_proxy.start()
    key, gate = await idle_proxy.key(), Gate()
    stub_engine.pace = gate
    await leave(idle_proxy, key, gate)
    async with asyncio.timeout(30):
        while not stub_engine.called_off:
            await asyncio.sleep(0.02)
    gate.open()
    assert (await post(idle_proxy, key)).status_code == 200
    sealed = await idle_proxy.end()
    assert (sealed.turns, sealed.unanswered) == ((0,), 0)


async def test_a_whole_answer_that_nobody_read_is_abandoned_and_asked_anew(
    idle_proxy: ProxyAtWork, stub_engine: StubEngine
) -> None:
    idle_proxy.set(proxy_grace_s=2.0)
    await idle_proxy.start()
    gate = Gate()
    stub_engine.pace = gate
    key = await idle_proxy.key()
    await leave(idle_proxy, key, gate)
    gate.open()
    [turn] = await idle_proxy.turns_when(1)
    assert (turn.status, turn.finish) == (TurnStatus.ABANDONED, FinishReason.STOP)
    assert (await post(idle_proxy, key)).status_code == 200
    first, second = await idle_proxy.turns()
    assert (second.cause, second.status) == (BranchCause.START, TurnStatus.DELIVERED)
    assert unpack_ids(second.suffix) == unpack_ids(first.suffix)


async def test_the_same_question_after_an_answer_is_a_new_sample(proxy: ProxyAtWork, stub_engine: StubEngine) -> None:
    stub_engine.says("one", "two")
    key = await proxy.key()
    told = [(await post(proxy, key)).json()["choices"][0]["message"]["content"] for _ in range(2)]
    assert told == ["one", "two"]
    first, second = await proxy.turns()
    assert (second.cause, second.parent, second.suffix) == (BranchCause.RESAMPLED, 0, b"")
    assert stub_engine.requests[0].token_ids == stub_engine.requests[1].token_ids
    assert stub_engine.requests[0].sampling_params.seed != stub_engine.requests[1].sampling_params.seed
    assert first.digest == second.digest


async def test_a_library_that_counts_its_retries_gets_the_same_sample(
    proxy: ProxyAtWork, stub_engine: StubEngine
) -> None:
    stub_engine.says("one", "two")
    key = await proxy.key()
    first = (await post(proxy, key)).json()
    async with httpx.AsyncClient() as client:
        again = await client.post(
            f"{proxy.base_url()}/chat/completions",
            json=BODY,
            headers={"Authorization": f"Bearer {key}", "x-stainless-retry-count": "1"},
        )
    assert again.json()["choices"] == first["choices"]
    assert again.json()["id"] == first["id"]
    assert len(await proxy.turns()) == 1


async def test_two_agents_that_ask_the_same_at_once_get_a_sample_each(
    proxy: ProxyAtWork, stub_engine: StubEngine
) -> None:
    gate = Gate()
    stub_engine.pace = gate
    key = await proxy.key()
    both = [asyncio.create_task(post(proxy, key)) for _ in range(2)]
    while len(stub_engine.requests) < 2:
        await asyncio.sleep(0.01)
    gate.open()
    assert [answer.status_code for answer in await asyncio.gather(*both)] == [200, 200]
    assert [turn.turn for turn in await proxy.turns()] == [0, 1]


@pytest.mark.parametrize("used", [0, 1])
async def test_of_a_call_that_was_sent_twice_at_once_only_the_answer_that_was_used_is_trained(
    proxy: ProxyAtWork, stub_engine: StubEngine, used: int
) -> None:
    """As a doubled request looks here: both connections live, and both answers are read to their end."""
    stub_engine.pace = gate = Gate()
    stub_engine.says("one", "two", "went on")
    client = await proxy.client()

    async def ask(*messages: dict[str, str]) -> str:
        answer = await client.chat.completions.create(model="m", messages=messages)  # type: ignore[arg-type]
        return answer.choices[0].message.content or ""

    both = [asyncio.create_task(ask(USER)) for _ in range(2)]
    while len(stub_engine.requests) < 2:
        await asyncio.sleep(0.01)
    gate.open()
    answers = await asyncio.gather(*both)
    assert sorted(answers) == ["one", "two"]
    assert await ask(USER, {"role": "assistant", "content": answers[used]}, {"role": "user", "content": "on"})
    sealed = await proxy.end()
    turns = await proxy.turns()
    merged = merge(rebuild(turns, sealed.turns), orphaned=sealed.orphaned)
    assert [turn.status for turn in turns] == [TurnStatus.DELIVERED] * 3
    assert unpack_ids(merged.sequences[0].ids)[-len(stopped("went on")) :] == stopped("went on")
    assert [[unpack_ids(turns[turn].sampled) for turn in sequence.turns] for sequence in merged.sequences] == [
        [stopped(answers[used]), stopped("went on")]
    ]
    assert merged.dropped == (Dropped(reason="superseded", tokens=len(stopped(answers[1 - used]))),)


async def test_an_engine_that_is_loading_or_breaks_off_is_waited_for(
    proxy: ProxyAtWork, stub_engine: StubEngine
) -> None:
    stub_engine.fail = 2
    stub_engine.break_after = 2
    stub_engine.says("whole")
    key = await proxy.key()
    answer = await post(proxy, key)
    assert answer.json()["choices"][0]["message"]["content"] == "whole"
    [turn] = await proxy.turns()
    assert unpack_ids(turn.sampled) == stopped("whole")
    assert len(stub_engine.requests) == 4
    assert (await proxy.end()).engine_failures == 0


@pytest.mark.parametrize("status", [429, 503])
async def test_an_engine_that_is_overloaded_is_waited_for_and_never_shown(
    proxy: ProxyAtWork, stub_engine: StubEngine, status: int
) -> None:
    stub_engine.fail, stub_engine.fail_status = 2, status
    assert (await post(proxy, await proxy.key())).status_code == 200
    assert len(stub_engine.requests) == 3


async def test_the_same_question_with_a_larger_limit_is_a_sample_of_its_own_even_as_a_retry(
    proxy: ProxyAtWork, stub_engine: StubEngine
) -> None:
    """As qwen-code does it where an answer was cut or broken."""
    stub_engine.says("one", "two")
    key = await proxy.key()
    await post(proxy, key, max_tokens=32)
    async with httpx.AsyncClient(timeout=30) as client:
        again = await client.post(
            f"{proxy.base_url()}/chat/completions",
            json=BODY | {"max_tokens": 64},
            headers={"Authorization": f"Bearer {key}", "x-stainless-retry-count": "1"},
        )
    assert again.json()["choices"][0]["message"]["content"] == "two"
    first, second = await proxy.turns()
    assert (second.cause, second.parent, second.suffix) == (BranchCause.RESAMPLED, 0, b"")
    assert (first.sampling.max_tokens, second.sampling.max_tokens) == (32, 64)


async def test_an_engine_that_was_down_for_a_moment_costs_nothing(proxy: ProxyAtWork, stub_engine: StubEngine) -> None:
    await stub_engine.stop()
    key = await proxy.key()
    answer = asyncio.create_task(post(proxy, key))
    await asyncio.sleep(0.5)
    await stub_engine.start()
    assert (await answer).status_code == 200


async def test_an_engine_that_stays_away_is_shown_as_500_and_counted(
    idle_proxy: ProxyAtWork, stub_engine: StubEngine
) -> None:
    idle_proxy.set(engine_patience_s=0.3)
    await idle_proxy.start()
    await stub_engine.stop()
    key = await idle_proxy.key()
    answer = await post(idle_proxy, key)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_failed")
    assert (await idle_proxy.end()).engine_failures == 1
    assert await idle_proxy.turns() == []


async def test_a_failure_that_a_repeat_mended_is_not_counted(idle_proxy: ProxyAtWork, stub_engine: StubEngine) -> None:
    idle_proxy.set(engine_patience_s=0.3)
    await idle_proxy.start()
    stub_engine.fail = 3
    key = await idle_proxy.key()
    assert (await post(idle_proxy, key)).status_code == 500
    stub_engine.fail = 0
    assert (await post(idle_proxy, key)).status_code == 200
    assert (await idle_proxy.end()).engine_failures == 0


async def test_an_engine_that_dies_after_text_was_shown_ends_the_stream_with_an_error(
    proxy: ProxyAtWork, stub_engine: StubEngine
) -> None:
    gate = Gate(upto=3)
    stub_engine.pace = gate
    stub_engine.break_after = 3
    stub_engine.script = lambda request: stopped("abcdef")
    client = await proxy.client()
    stream = await client.chat.completions.create(model="m", messages=[USER], stream=True)  # type: ignore[list-item]
    chunks = aiter(stream)
    seen = ""
    while len(seen) < 3:
        seen += (await anext(chunks)).choices[0].delta.content or ""
    gate.open()
    with pytest.raises(openai.APIError, match="could not answer"):
        await anext(chunks)
    assert seen == "abc"
    [turn] = await proxy.turns()
    assert turn.status is TurnStatus.ABANDONED
    told = await client.chat.completions.create(model="m", messages=[USER])  # type: ignore[list-item]
    assert told.choices[0].message.content == "abcdef"
    assert (await proxy.end()).engine_failures == 0


async def test_a_sentinel_is_no_log_prob(proxy: ProxyAtWork, stub_engine: StubEngine) -> None:
    stub_engine.logprob = lambda index: -9999.0
    key = await proxy.key()
    answer = await post(proxy, key)
    assert answer.status_code == 500
    assert await proxy.turns() == []
    assert (await proxy.end()).engine_failures == 1

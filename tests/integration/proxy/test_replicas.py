"""Several proxies at one run: they share nothing but the bus, and any of them serves the next call."""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import openai
import pytest
from proxy_fixtures import ProxyAtWork, started_process
from stub_engine import Gate, StubEngine, stopped

from openforge.bus import Bus
from openforge.protos import BranchCause, TurnStatus, unpack_ids
from openforge.proxy.listening import socket_path
from openforge.tokens import merge, rebuild

AT_ONCE = 12
USER = {"role": "user", "content": "hi"}


@pytest.fixture
async def pair(
    idle_proxy: ProxyAtWork, bus: Bus, stub_engine: StubEngine, tmp_path: Path
) -> AsyncIterator[tuple[ProxyAtWork, ProxyAtWork]]:
    """Two proxies of one run; the second has not started yet."""
    second = ProxyAtWork(bus, stub_engine.url, idle_proxy.config, tmp_path / "s2")
    for proxy in (idle_proxy, second):
        proxy.set(proxy_replicas=2)
    await idle_proxy.start()
    yield idle_proxy, second
    await second.stop()


async def post(proxy: ProxyAtWork, key: str, messages: list[dict[str, str]], **changes: object) -> httpx.Response:
    async with httpx.AsyncClient(timeout=60) as client:
        return await client.post(
            f"{proxy.base_url()}/chat/completions",
            json={"model": "m", "messages": messages, **changes},
            headers={"Authorization": f"Bearer {key}"},
        )


def told(answer: httpx.Response) -> dict[str, str]:
    assert answer.status_code == 200, answer.text
    return {"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]}


async def test_calls_that_alternate_between_two_proxies_are_one_branch(
    pair: tuple[ProxyAtWork, ProxyAtWork], stub_engine: StubEngine
) -> None:
    first, second = pair
    await second.start()
    stub_engine.script = lambda request: stopped(f"answer {len(stub_engine.requests)}")
    key = await first.key()
    messages: list[dict[str, str]] = [USER]
    for step in range(6):
        messages += [told(await post(pair[step % 2], key, messages)), USER]
    turns = await first.turns()
    assert [turn.cause for turn in turns] == [BranchCause.START] + [BranchCause.CONTINUED] * 5
    merged = merge(rebuild(turns))
    assert (len(merged.sequences), merged.delivered_fraction, merged.extra_prefill_ratio) == (1, 1.0, 1.0)
    assert (await first.end()).turns == (0, 1, 2, 3, 4, 5)
    assert [(await post(proxy, key, messages)).status_code for proxy in pair] == [409, 409]


async def test_an_end_stops_the_work_of_every_proxy(
    pair: tuple[ProxyAtWork, ProxyAtWork], stub_engine: StubEngine
) -> None:
    await pair[1].start()
    gate = Gate(upto=2)
    stub_engine.pace = gate
    stub_engine.script = lambda request: stopped("abcdef")
    key = await pair[0].key()
    open_calls = [asyncio.create_task(post(proxy, key, [USER])) for proxy in pair]
    async with asyncio.timeout(60):
        while len(stub_engine.requests) < 2:
            await asyncio.sleep(0.02)
    await gate.reached.wait()
    await pair[0].end()
    assert [answer.status_code for answer in await asyncio.gather(*open_calls)] == [409, 409]
    assert {turn.status for turn in await pair[0].turns_when(2)} == {TurnStatus.ABORTED}


@pytest.mark.parametrize("way", ["port", "path"])
async def test_proxies_that_share_an_address_serve_all_harnesses_though_one_is_killed_in_mid_stream(
    pair: tuple[ProxyAtWork, ProxyAtWork], stub_engine: StubEngine, tmp_path: Path, way: str
) -> None:
    """Each harness has one address and repeats what broke. The kernel gives some of the connections to each proxy; the
    path leads to the proxy that came last, which is the one that dies."""
    first, second = pair
    second.set(proxy_url=first.settings.proxy_url, sockets=first.settings.sockets)
    process = await started_process(second, tmp_path)
    path = str(socket_path(first.settings)) if way == "path" else None
    first_calls, second_calls = Gate(upto=2), Gate(upto=2)
    stub_engine.pace = first_calls
    stub_engine.script = lambda request: stopped(f"answer {len(stub_engine.requests)}")
    harnesses = [asyncio.create_task(converse(first, f"e-{number}", path)) for number in range(AT_ONCE)]
    try:
        async with asyncio.timeout(120):
            while len(stub_engine.requests) < AT_ONCE:
                await asyncio.sleep(0.02)
            stub_engine.pace = second_calls
            first_calls.open()  # each proxy has met its harnesses
            while len(stub_engine.requests) < 2 * AT_ONCE:
                await asyncio.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        await process.wait()
    second_calls.open()
    talks = await asyncio.gather(*harnesses)
    assert sum(broken for _, broken in talks) > 0
    for number, (answers, _) in enumerate(talks):
        sealed = await first.end(f"e-{number}")
        turns = await first.turns(f"e-{number}")
        merged = merge(rebuild(turns, sealed.turns), orphaned=sealed.orphaned)
        assert sealed.turns == tuple(turn.turn for turn in turns)
        [sequence] = merged.sequences
        assert [unpack_ids(turns[turn].sampled) for turn in sequence.turns] == [stopped(answer) for answer in answers]


async def converse(proxy: ProxyAtWork, episode: str, path: str | None) -> tuple[list[str], int]:
    """Three turns; the answers that were read to their end, and how many streams broke."""
    transport = httpx.AsyncHTTPTransport(uds=path)
    key = await proxy.key(episode, turns=200, lives_s=600)
    answers: list[str] = []
    broken = 0
    async with (
        httpx.AsyncClient(transport=transport, timeout=60) as http,
        openai.AsyncOpenAI(base_url=proxy.base_url(episode), api_key=key, max_retries=0, http_client=http) as client,
    ):
        while len(answers) < 3:
            said = [{"role": "user", "content": episode}]
            for answer in answers:
                said += [{"role": "assistant", "content": answer}, USER]
            try:
                text, finish = "", None
                chunks = await client.chat.completions.create(model="m", messages=said, stream=True)  # type: ignore[arg-type]
                async for chunk in chunks:
                    text += chunk.choices[0].delta.content or ""
                    finish = chunk.choices[0].finish_reason or finish
            except (openai.APIError, httpx.HTTPError):
                broken += 1
                await asyncio.sleep(0.05)
                continue
            answers += [text] if finish else []
    return answers, broken


async def test_a_proxy_that_dies_in_mid_stream_costs_no_token_and_doubles_none(
    pair: tuple[ProxyAtWork, ProxyAtWork], stub_engine: StubEngine, tmp_path: Path
) -> None:
    first, second = pair
    stub_engine.says("one")
    key = await first.key()
    process = await started_process(second, tmp_path)
    try:
        history = [USER, told(await post(second, key, [USER])), USER]
        gate = Gate(upto=2)
        stub_engine.pace = gate
        stub_engine.says("two")
        broken = asyncio.create_task(post(second, key, history, stream=True))
        await gate.reached.wait()
    finally:
        process.send_signal(signal.SIGKILL)
        await process.wait()
    with pytest.raises(httpx.HTTPError):
        await broken
    stub_engine.pace = None
    again = told(await post(first, key, history))
    assert again["content"] == "two"
    assert told(await post(first, key, [*history, again, USER]))["content"] == "two"
    turns = await first.turns()
    assert [turn.cause for turn in turns] == [BranchCause.START, BranchCause.CONTINUED, BranchCause.CONTINUED]
    [sequence] = merge(rebuild(turns)).sequences
    assert sequence.turns == (0, 1, 2)
    assert [unpack_ids(turn.sampled) for turn in turns] == [stopped("one"), stopped("two"), stopped("two")]

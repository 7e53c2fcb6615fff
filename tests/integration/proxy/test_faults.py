"""A client library with its own retries, a network that cuts, an engine that fails: the record stays true."""

import asyncio
import random
from collections import Counter

import httpx
import openai
import pytest
from flaky_network import FlakyNetwork
from proxy_fixtures import ProxyAtWork
from stub_engine import StubEngine, stopped
from wanderer import RENDERER

from openforge.chat.contract import Message
from openforge.protos import unpack_ids
from openforge.tokens import merge, rebuild

EPISODES, TURNS = 3, 4


@pytest.mark.parametrize("seed", [1, 2])
async def test_no_token_is_lost_or_doubled_over_cuts_failures_and_repeats(
    idle_proxy: ProxyAtWork, stub_engine: StubEngine, seed: int
) -> None:
    """Every answer is another one, so that each can be found again in what would be trained."""
    idle_proxy.set(proxy_grace_s=30.0, engine_patience_s=2.0)
    await idle_proxy.start()
    rng = random.Random(seed)
    network = FlakyNetwork(int(idle_proxy.settings.proxy_url.rsplit(":", 1)[1]))
    await network.start()
    stub_engine.script = lambda request: stopped(f"answer {len(stub_engine.requests)} of the assistant")
    weather = asyncio.create_task(storm(rng, network, stub_engine))
    try:
        talks = [talk(idle_proxy, network, f"e-{number}", rng) for number in range(EPISODES)]
        conversations = await asyncio.gather(*talks)
    finally:
        weather.cancel()
        await network.close()
    for number, messages in enumerate(conversations):
        sealed = await idle_proxy.end(f"e-{number}")
        conversation = rebuild(await idle_proxy.turns(f"e-{number}"), sealed.turns)
        merged = merge(conversation, orphaned=sealed.orphaned)
        trained = [
            RENDERER.text(unpack_ids(conversation.turns[turn].fact.sampled))
            for sequence in merged.sequences
            for turn in sequence.turns
        ]
        answers = [message.content for message in messages if message.role == "assistant"]
        assert Counter(trained) == Counter(answers)
        assert len(merged.sequences) == 1
        # superseded: the end was written and lost on the way, so the question came again, and is a new sample
        assert {entry.reason for entry in merged.dropped} <= {"abandoned", "orphaned", "superseded"}
        whole = sum(len(unpack_ids(turn.fact.sampled)) for turn in conversation)
        assert merged.sampled_tokens == whole


async def storm(rng: random.Random, network: FlakyNetwork, engine: StubEngine) -> None:
    """Every moment something breaks and is mended again."""

    async def slow(index: int) -> None:
        await asyncio.sleep(rng.choice((0, 0, 0.02)))

    engine.pace = slow
    for _ in range(12):
        await asyncio.sleep(rng.uniform(0.05, 0.3))
        match rng.randrange(4):
            case 0:
                network.cut()
                await asyncio.sleep(0.05)
                network.heal()
            case 1:
                network.swallow_answers()
                await asyncio.sleep(0.1)
                network.cut()
                network.heal()
            case 2:
                engine.fail = rng.randrange(1, 3)
            case 3:
                engine.break_after = rng.randrange(1, 8)
    engine.pace, engine.fail, engine.break_after = None, 0, None


async def talk(proxy: ProxyAtWork, network: FlakyNetwork, episode: str, rng: random.Random) -> list[Message]:
    """What the harness keeps: only answers that it read to their end."""
    messages = [Message(role="user", content=episode)]
    base_url = f"http://127.0.0.1:{network.port}/ep/{episode}.0/v1"
    key = await proxy.key(episode, turns=200)
    async with openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=2, timeout=20.0) as client:
        for turn in range(TURNS):
            answer = await until_read(client, messages, stream=rng.random() < 0.5)
            messages += [Message(role="assistant", content=answer), Message(role="user", content=f"go on, {turn}")]
    return messages


async def until_read(client: openai.AsyncOpenAI, messages: list[Message], *, stream: bool) -> str:
    said = [{"role": message.role, "content": message.content} for message in messages]
    async with asyncio.timeout(120):
        while True:
            try:
                if not stream:
                    whole = await client.chat.completions.create(model="m", messages=said)  # type: ignore[arg-type]
                    return whole.choices[0].message.content or ""
                chunks = await client.chat.completions.create(model="m", messages=said, stream=True)  # type: ignore[arg-type]
                text, finish = "", None
                async for chunk in chunks:
                    text += chunk.choices[0].delta.content or ""
                    finish = chunk.choices[0].finish_reason or finish
            except (openai.APIError, httpx.HTTPError):  # a stream that is cut raises what the library below raises
                await asyncio.sleep(0.05)
                continue
            if finish:
                return text

"""Token truth: real weights behind the proxy, and the record against a full recomputation."""

import asyncio
from pathlib import Path

import openai
import pytest
from engine_fixtures import engine_over_http, publish
from proxy_fixtures import RUN, ProxyAtWork, run_config
from reference_model import largest_difference, reference_logprobs

from openforge.bus import Bus
from openforge.models import tiny
from openforge.protos import BranchCause, TurnRecorded, unpack_ids, unpack_logprobs
from openforge.runs import submit
from openforge.tokens import merge, rebuild

EPISODES, TURNS = 8, 5
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [tiny(root / f"m{seed}", seed=seed, context=4096) for seed in (0, 1)]


async def test_recorded_log_probs_are_those_of_a_full_recomputation_version_by_version(
    bus: Bus, models: list[Path], tmp_path: Path
) -> None:
    weights = [Path(publish(tmp_path / "weights", model, version).path) for version, model in enumerate(models)]
    sampling = {"max_tokens": 24, "temperature": 0.7}
    config = run_config(models[0], sampling=sampling, engine={"dtype": "float32"})
    await submit(bus, config)
    async with engine_over_http(weights[0], context=4096) as engine:
        proxy = ProxyAtWork(bus, engine.url, config, tmp_path / "s")
        await proxy.start()
        try:
            talks = asyncio.gather(*(talk(proxy, f"e-{number}") for number in range(EPISODES)))
            await asyncio.wait_for(until_recorded(bus, EPISODES), 60)
            await engine.backend.apply(weights[1], "", 1)
            await talks
        finally:
            await proxy.close_clients()
            await proxy.stop()
    versions = set()
    for number in range(EPISODES):
        turns = await proxy.turns(f"e-{number}")
        merged = merge(rebuild(turns))
        assert [turn.cause for turn in turns] == [BranchCause.START] + [BranchCause.CONTINUED] * (TURNS - 1)
        assert (len(merged.sequences), merged.delivered_fraction, merged.extra_prefill_ratio) == (1, 1.0, 1.0)
        for rebuilt in rebuild(turns):
            answer = unpack_ids(rebuilt.fact.sampled)
            recorded = unpack_logprobs(rebuilt.fact.logprobs)
            for span in rebuilt.fact.versions:
                versions.add(span.version)
                true = reference_logprobs(models[span.version], rebuilt.prompt_ids(), answer, temperature=0.7)
                end = span.start + span.length
                assert largest_difference(recorded[span.start : end], true[span.start : end]) < 1e-3
    assert versions == {0, 1}


async def talk(proxy: ProxyAtWork, episode: str) -> None:
    """Five turns, every other one as a stream, with whatever a random model says."""
    client = await proxy.client(episode)
    messages: list[dict[str, object]] = [{"role": "system", "content": "Work."}, {"role": "user", "content": episode}]
    for turn in range(TURNS):
        messages.append(await (streamed if turn % 2 else whole)(client, messages))
        messages.append({"role": "user", "content": f"Go on, {turn}."})


async def whole(client: openai.AsyncOpenAI, messages: list[dict[str, object]]) -> dict[str, object]:
    told = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)  # type: ignore[call-overload]
    return dict(told.choices[0].message.model_dump(exclude_none=True))


async def streamed(client: openai.AsyncOpenAI, messages: list[dict[str, object]]) -> dict[str, object]:
    stream = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS, stream=True)  # type: ignore[call-overload]
    content = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    return {"role": "assistant", "content": content}


async def until_recorded(bus: Bus, turns: int) -> None:
    while await bus.count(TurnRecorded, RUN) < turns:
        await asyncio.sleep(0.02)

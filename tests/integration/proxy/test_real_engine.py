"""Token truth: real weights behind the proxy, and the record against a full recomputation."""

import asyncio
import io
from pathlib import Path

import numpy as np
import openai
import pytest
from engine_fixtures import engine_over_http, publish
from proxy_fixtures import RUN, ProxyAtWork, run_config
from reference_model import (
    assert_chosen_by,
    largest_difference,
    reference_logprobs,
    reference_router_probabilities,
)

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


async def test_the_experts_of_every_token_are_kept_before_the_turn_is_told(bus: Bus, tmp_path: Path) -> None:
    mixtures = [tiny(tmp_path / f"m{seed}", seed=seed, context=4096, experts=8) for seed in (0, 1)]
    weights = [Path(publish(tmp_path / "weights", model, version).path) for version, model in enumerate(mixtures)]
    config = run_config(mixtures[0], sampling={"max_tokens": 12}, engine={"dtype": "float32"})
    await submit(bus, config)
    async with engine_over_http(weights[0], context=4096, routed_experts=True) as engine:
        proxy = ProxyAtWork(bus, engine.url, config, tmp_path / "s")
        await proxy.start()
        try:
            talking = asyncio.create_task(talk(proxy, "e-0"))
            await asyncio.wait_for(until_recorded(bus, 2), 60)
            await engine.backend.apply(weights[1], "", 1)
            await talking
        finally:
            await proxy.close_clients()
            await proxy.stop()
    conversation = rebuild(await proxy.turns("e-0"))
    at_once = 0
    for turn in conversation:
        assert turn.fact.routed_experts is not None
        rows = np.load(io.BytesIO(await bus.blobs.get(turn.fact.routed_experts)), allow_pickle=False)
        start = turn.fact.routed_from
        assert (rows.dtype, rows.shape) == (np.uint8, (turn.length - 1 - start, 2, 2))
        versions = {span.version for span in turn.fact.versions}
        if len(versions) == 1:
            at_once += 1
            ids = [*turn.prompt_ids(), *unpack_ids(turn.fact.sampled)]
            assert_chosen_by(reference_router_probabilities(mixtures[versions.pop()], ids[:-1])[start:], rows)
    assert at_once >= TURNS - 1, "one turn at most saw both versions"
    (sequence,) = merge(conversation).sequences
    covered = {at for span in sequence.routed_at for at in range(span.start, span.start + span.length)}
    assert covered == set(range(len(unpack_ids(sequence.ids)) - 1))


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

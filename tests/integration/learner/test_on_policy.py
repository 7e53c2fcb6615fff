"""What an engine says of its tokens is what the learner computes for them, while both have the same weights."""

import asyncio
import random
from pathlib import Path

import msgspec
import pytest
from engine_fixtures import engine_over_http
from learner_world import run_config, tiny_model

from openforge.learner.backends.torch_fsdp import TorchBackend
from openforge.learner.packing import TrainSequence


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_in_float32_the_learners_ratio_to_an_engine_is_one_at_any_temperature(
    tmp_path: Path, temperature: float
) -> None:
    backend = TorchBackend(run_config(tiny_model(tmp_path), algorithm={"loss": "ppo_clip"}))
    rng = random.Random(0)
    prompts = [[1, *(rng.randrange(3, backend.vocabulary) for _ in range(length))] for length in (3, 30, 30, 80)]
    params = {"max_tokens": 40, "temperature": temperature, "ignore_eos": True, "seed": 0}
    async with engine_over_http(tmp_path / "model") as engine:
        answers = await asyncio.gather(*(engine.generate(prompt, sampling_params=params) for prompt in prompts))
    sequences = [
        _sequence(prompt, answer.json()["choices"][0], temperature, advantage=(-1.0) ** index)
        for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    stats = backend.train(sequences, 0)
    assert stats.loss_tokens == 4 * 40
    assert stats.gap_max < 1e-4
    assert stats.ratio_mean == pytest.approx(1.0, abs=1e-4)
    elsewhere = [msgspec.structs.replace(one, temperature=temperature + 0.4) for one in sequences]
    assert TorchBackend(backend.config).train(elsewhere, 0).gap_max > 1e-2, "the temperature is part of the policy"


def _sequence(prompt: list[int], choice: dict[str, list[int]], temperature: float, advantage: float) -> TrainSequence:
    answer = choice["token_ids"]
    return TrainSequence(
        ids_T=[*prompt, *answer],
        at_K=list(range(len(prompt), len(prompt) + len(answer))),
        mu_logprobs_K=[entry["logprob"] for entry in choice["logprobs"]["content"]],  # type: ignore[call-overload,index]
        advantage=advantage,
        weight=1.0 / (4 * len(answer)),
        temperature=temperature,
    )

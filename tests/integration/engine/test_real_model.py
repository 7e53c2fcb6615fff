"""The real model: exact in float32, and the benchmark's one JSON object."""

import asyncio
import sys
from pathlib import Path

import msgspec
import pytest
from engine_fixtures import engine_over_http
from reference_model import largest_difference, reference_logprobs

from openforge.models import get, tiny

pytestmark = pytest.mark.heavy


async def test_smollm2_in_float32_has_the_logprobs_of_a_full_recomputation() -> None:
    folder = get("smollm2-135m")
    shared = [1, *range(2000, 2100)]
    prompts = [[*shared, *range(500 * group, 500 * group + 15)] for group in (1, 2, 3)] * 2
    async with engine_over_http(folder) as engine:
        params = {"max_tokens": 24, "temperature": 0.7, "ignore_eos": True}
        answers = await asyncio.gather(*(engine.generate(prompt, sampling_params=params) for prompt in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        choice = answer.json()["choices"][0]
        stated = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        expected = reference_logprobs(folder, prompt, choice["token_ids"], temperature=0.7)
        assert largest_difference(stated, expected) < 1e-4


async def test_the_benchmark_prints_one_json_object(tmp_path: Path) -> None:
    options = ["--model", str(tiny(tmp_path / "tiny")), "--threads", "1", "--requests", "2", "--repeats", "1"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "openforge.cli.bench.engine", "--json", *options),
        env={"PYTHONPATH": ":".join(("protos", "libs", "services")), "PATH": "/usr/bin:/bin"},
        stdout=asyncio.subprocess.PIPE,
    )
    stdout, _ = await process.communicate()
    assert process.returncode == 0
    report = msgspec.json.decode(stdout)
    assert report["threads"]["1"]["requests"]["2"]["tokens_per_s"] > 0
    assert report["threads"]["1"]["peer_transformers_32"]["tokens_per_s"] > 0


async def test_the_benchmark_of_weights_prints_one_json_object(tmp_path: Path) -> None:
    options = ["--model", str(tiny(tmp_path / "tiny")), "--engines", "embedded", "--repeats", "2", "--clients", "1"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "openforge.cli.bench.weights", "--json", *options),
        env={"PYTHONPATH": ":".join(("protos", "libs", "services")), "PATH": "/usr/bin:/bin"},
        stdout=asyncio.subprocess.PIPE,
    )
    stdout, _ = await process.communicate()
    assert process.returncode == 0
    measured = msgspec.json.decode(stdout)["engines"]["embedded"]
    parts = measured["copy_s"] + measured["load_s"] + measured["probe_s"]
    assert parts > 0
    assert measured["announce_to_first_token_s_p50"] > measured["copy_s"] > 0

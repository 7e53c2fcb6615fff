"""The embedded engine with published adapters: what it answers is what peft makes of them."""

import asyncio
import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from engine_fixtures import engine_over_http, publish, publish_adapters
from reference_model import largest_difference, reference_logprobs
from safetensors.torch import load_file

from openforge.engine.batching import score
from openforge.engine.embedded import EmbeddedEngine, EngineOptions
from openforge.engine.loading import load
from openforge.models import tiny
from openforge.weights import BadWeights, Written, read_manifest
from openforge.weights.adapters import merged, read_adapters, whole_folder

PROMPT = [1, *range(30, 90)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("models") / "m")


def _publish(root: Path, model: Path, versions: int) -> tuple[list[Written], list[Path]]:
    wholes = [root / f"whole-{version}" for version in range(versions)]
    return [publish_adapters(root / "w", model, version, whole) for version, whole in enumerate(wholes)], wholes


async def test_adapters_change_in_flight_and_each_token_has_the_logprob_of_its_own_version(
    model: Path, tmp_path: Path
) -> None:
    written, wholes = _publish(tmp_path, model, 2)
    async with engine_over_http(None) as engine:
        await engine.backend.apply(written[0].path, written[0].digest, 0)
        params = {"max_tokens": 400, "ignore_eos": True, "logprobs": 0, "seed": 3}
        asked = asyncio.create_task(engine.generate(PROMPT, sampling_params=params))
        async with asyncio.timeout(60):
            while engine.backend.engine.running.batch.counters.generation_tokens < 2:
                await asyncio.sleep(0.002)
        outcome = await engine.backend.apply(written[1].path, written[1].digest, 1)
        assert outcome.probe_error < 1e-4
        choice = (await asked).json()["choices"][0]
        ids, stated = choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]
        before, after = choice["weight_versions"]
        change = before["end"]
        assert (before["version"], after["version"], after["end"]) == ("0", "1", 400)
        assert largest_difference(stated[:change], reference_logprobs(wholes[0], PROMPT, ids)[:change]) < 1e-4
        assert largest_difference(stated[change:], reference_logprobs(wholes[1], PROMPT, ids)[change:]) < 1e-4


async def test_a_version_answers_with_the_same_bits_after_any_number_of_others(model: Path, tmp_path: Path) -> None:
    """Every version is put on the weights below, so that nothing is left of what was served before."""
    written, _ = _publish(tmp_path, model, 3)
    alone = score(load(written[0].path, "float32").model, PROMPT, [50, 60, 2])
    engine = EmbeddedEngine(EngineOptions(dtype="float32"))
    try:
        for version in (0, 1, 2, 1, 2, 0):
            await engine.load(written[version].path, written[version].digest)
        assert await engine.running.ask(lambda batch: batch.score(PROMPT, [50, 60, 2])) == alone
    finally:
        await engine.stop()


def test_a_version_is_written_out_whole_for_whoever_loads_plain_folders(model: Path, tmp_path: Path) -> None:
    (written,), (whole,) = _publish(tmp_path, model, 1)
    folder = whole_folder(written.path, tmp_path / "merged")
    found = reference_logprobs(folder, PROMPT, [50, 60, 2])
    assert largest_difference(found, reference_logprobs(whole, PROMPT, [50, 60, 2])) < 1e-5
    assert (folder / "tokenizer.json").exists()


def test_merged_weights_are_those_of_peft(model: Path, tmp_path: Path) -> None:
    (written,), (whole,) = _publish(tmp_path, model, 1)
    own, theirs = (
        merged(load_file(model / "model.safetensors"), read_adapters(written.path)),
        load_file(whole / "model.safetensors"),
    )
    assert own.keys() == theirs.keys()
    changed = [name for name in own if not torch.equal(own[name], load_file(model / "model.safetensors")[name])]
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "v_proj", "down_proj"}
    assert all(torch.allclose(own[name], theirs[name], atol=1e-6) for name in own)


async def test_adapters_of_other_weights_and_broken_ones_are_refused_and_those_before_go_on(
    model: Path, tmp_path: Path
) -> None:
    written, _ = _publish(tmp_path, model, 3)
    other = tmp_path / "other"
    publish_adapters(other, tiny(tmp_path / "m2", seed=5), 0, tmp_path / "whole-other")
    shutil.copytree(written[1].path, other / "v000001-0")
    async with engine_over_http(None) as engine:
        await engine.backend.apply(written[0].path, written[0].digest, 0)
        with pytest.raises(BadWeights, match="manifest has digest"):
            await engine.backend.apply(other / "v000001-0", written[1].digest, 1)
        config = written[2].path / "adapter_config.json"
        config.write_bytes(config.read_bytes().replace(b'"r": 4', b'"r": 5'))
        with pytest.raises(BadWeights, match="adapter_config"):
            await engine.backend.apply(written[2].path, written[2].digest, 2)
        assert engine.backend.engine.version == "0"


def test_what_is_more_than_a_low_rank_sum_is_refused(model: Path, tmp_path: Path) -> None:
    (written,), _ = _publish(tmp_path, model, 1)
    config = written.path / "adapter_config.json"
    stated = msgspec.json.decode(config.read_bytes())
    config.write_bytes(msgspec.json.encode(stated | {"use_dora": True}))
    with pytest.raises(BadWeights, match="use_dora"):
        read_adapters(written.path)
    config.write_bytes(msgspec.json.encode(stated))
    narrow = {name: tensor[..., :8].clone() for name, tensor in load_file(model / "model.safetensors").items()}
    with pytest.raises(BadWeights, match=r"q_proj|v_proj|down_proj"):
        merged(narrow, read_adapters(written.path))


def test_whole_weights_need_no_merging(model: Path, tmp_path: Path) -> None:
    written = publish(tmp_path / "w", model, 0)
    assert read_manifest(written.path).base == ""
    assert whole_folder(written.path, tmp_path / "merged") == written.path

"""The vLLM driver against a process that speaks vLLM's wire and takes its command line."""

import asyncio
import base64
import hashlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import httpx
import msgspec
import pytest
from broadcasting import sender
from engine_fixtures import publish, publish_adapters

from openforge.bus.server import free_port
from openforge.engine.settings import Settings
from openforge.engine.vllm import EngineLost, VllmBackend
from openforge.models import tiny
from openforge.runs import RunConfig
from openforge.runs.config import EngineSection, EnvironmentSection, LearnerSection, ModelSection, RunSection
from openforge.weights import MANIFEST, BadWeights, Probe, Written, read_manifest
from openforge.wire.routed import Extent, extent_of

_STAND_IN = str(Path("tests/support/vllm_stand_in.py").absolute())
_SOURCES = os.pathsep.join(str(Path(folder).absolute()) for folder in ("protos", "libs", "services"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [tiny(root / f"m{seed}", seed=seed) for seed in (0, 1)]


@asynccontextmanager
async def _driver(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    *args: str,
    weight_path: Literal["disk", "gloo"] = "disk",
    routing_replay: bool = False,
) -> AsyncIterator[VllmBackend]:
    monkeypatch.setenv("PYTHONPATH", _SOURCES)
    settings = Settings(run="r", engine_url=f"http://127.0.0.1:{free_port()}", weight_call_timeout_s=10.0)
    config = RunConfig(
        run=RunSection(name="r", steps=1),
        model=ModelSection(path=str(model), context=256),
        engine=EngineSection(kind="vllm", dtype="float32", vllm_args=args, weight_path=weight_path),
        environment=EnvironmentSection(name="letters", harness="letters"),
        learner=LearnerSection(routing_replay=routing_replay),
    )
    driver = VllmBackend(settings, config, (sys.executable, _STAND_IN))
    await driver.start()
    try:
        yield driver
    finally:
        await driver.stop()


async def _apply(driver: VllmBackend, written: Written, version: int) -> float:
    return (await driver.apply(written.path, written.digest, version)).probe_error


async def _version(driver: VllmBackend) -> str:
    async with httpx.AsyncClient(base_url=driver._settings.engine_url) as client:
        return str((await client.get("/weight_info")).json()["weight_version"])


async def test_weights_are_carried_into_the_running_server_and_bad_ones_never_reach_it(
    models: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with _driver(models[0], monkeypatch) as driver:
        assert await _apply(driver, publish(tmp_path, models[0], 0), 0) < 1e-4
        child = driver._child
        assert await _version(driver) == "0"
        assert await _apply(driver, publish(tmp_path, models[1], 1), 1) < 1e-4
        assert await _version(driver) == "1"
        broken = publish(tmp_path, models[0], 2)
        (broken.path / "model.safetensors").write_bytes(b"x")
        with pytest.raises(BadWeights, match=r"model\.safetensors"):
            await _apply(driver, broken, 2)
        assert await _version(driver) == "1"
        assert driver._child is child


async def test_weights_are_broadcast_into_the_running_server_and_a_lost_learner_costs_a_restart(
    models: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with sender(tmp_path, bucket_bytes=1 << 16) as stream:
        async with _driver(models[0], monkeypatch, weight_path="gloo") as driver:
            written = [publish(tmp_path, models[version % 2], version) for version in range(4)]
            await _apply(driver, written[0], 0)
            child = driver._child
            for version in (1, 2):
                outcome = await driver.apply(written[version].path, written[version].digest, version, stream)
                assert outcome.probe_error < 1e-4
                assert await _version(driver) == str(version)
                assert driver._child is child
            nobody = f"127.0.0.1:{free_port()}"
            outcome = await driver.apply(written[3].path, written[3].digest, 3, nobody)
            assert outcome.probe_error < 1e-4
            assert await _version(driver) == "3"
            assert driver._child is not child


async def test_a_server_is_asked_for_experts_where_the_learner_replays_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mixture = tiny(tmp_path / "mixture", experts=4)
    async with _driver(mixture, monkeypatch, routing_replay=True) as driver:
        await _apply(driver, publish(tmp_path, mixture, 0), 0)
        asked = {"model": "policy", "token_ids": [1, 50, 60], "sampling_params": {"max_tokens": 4}}
        async with httpx.AsyncClient(base_url=driver._settings.engine_url) as client:
            answer = (await client.post("/inference/v1/generate", json=asked)).json()
        (choice,) = answer["choices"]
        assert extent_of(base64.b64decode(choice["routed_experts"])) == Extent(2 + len(choice["token_ids"]), 2, 2, 1)


async def test_a_failed_probe_brings_the_weights_before_back(
    models: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with _driver(models[0], monkeypatch) as driver:
        await _apply(driver, publish(tmp_path, models[0], 0), 0)
        lying = Probe(prompt_ids=(1, 40), token_ids=(50,), logprobs=(-0.25,))
        with pytest.raises(BadWeights, match="could not serve"):
            await _apply(driver, publish(tmp_path, models[1], 1, probe=lying), 1)
        assert await _version(driver) == "0"


async def test_a_weight_call_that_hangs_costs_the_process_group_and_nothing_else(
    models: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hang = tmp_path / "hang"
    async with _driver(models[0], monkeypatch, "--stand-in-fail-once", str(hang)) as driver:
        await _apply(driver, publish(tmp_path / "w", models[0], 0), 0)
        first = driver._child
        hang.touch()
        assert await _apply(driver, publish(tmp_path / "w", models[1], 1), 1) < 1e-4
        assert await _version(driver) == "1"
        assert first is not None
        assert first.returncode is not None
        assert driver._child is not first


async def test_adapters_are_swapped_in_the_running_server_and_a_failed_probe_brings_those_before_back(
    models: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written = [publish_adapters(tmp_path / "w", models[0], version, tmp_path / f"m{version}") for version in range(3)]
    lying = Probe(prompt_ids=(1, 40), token_ids=(50,), logprobs=(-0.25,))
    manifest = msgspec.structs.replace(read_manifest(written[2].path), probe=lying)
    (written[2].path / MANIFEST).write_bytes(data := msgspec.json.encode(manifest))
    async with _driver(models[0], monkeypatch) as driver:
        assert await _apply(driver, written[0], 0) < 1e-4
        child = driver._child
        assert await _apply(driver, written[1], 1) < 1e-4
        assert await _version(driver) == "1"
        assert driver._child is child
        with pytest.raises(BadWeights, match="could not serve"):
            await driver.apply(written[2].path, hashlib.sha256(data).hexdigest(), 2)
        assert await _version(driver) == "1"
        child = driver._child
        assert await _apply(driver, publish(tmp_path / "w", models[1], 3), 3) < 1e-4
        assert await _version(driver) == "3"
        assert driver._child is not child  # whole weights are another server


async def test_a_server_that_ends_by_itself_ends_the_service(
    models: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with _driver(models[0], monkeypatch) as driver:
        await _apply(driver, publish(tmp_path, models[0], 0), 0)
        assert driver._child is not None
        os.kill(driver._child.pid, signal.SIGKILL)
        with pytest.raises(EngineLost, match="ended with code"):
            await asyncio.wait_for(driver.died, 30)


async def test_a_server_does_not_outlive_the_service_that_drives_it(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    own = "sleep 600 & echo $$ $! > $0.new; mv $0.new $0; wait"  # a vLLM server has processes of its own
    leashed = [sys.executable, "-m", "openforge.engine.leash", "sh", "-c", own, str(pid_file)]
    script = f"import subprocess, time; subprocess.Popen({leashed!r}, start_new_session=True); time.sleep(600)"
    env = os.environ | {"PYTHONPATH": _SOURCES}
    service = await asyncio.create_subprocess_exec(sys.executable, "-c", script, env=env)
    async with asyncio.timeout(60):
        while not await asyncio.to_thread(_has_text, pid_file):
            await asyncio.sleep(0.05)
        processes = [int(pid) for pid in (await asyncio.to_thread(pid_file.read_text)).split()]
        assert len(processes) == 2
        service.kill()
        await service.wait()
        for pid in processes:
            while await asyncio.to_thread(_lives, pid):
                await asyncio.sleep(0.05)


def _has_text(file: Path) -> bool:
    return file.exists() and bool(file.read_text().strip())


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # where nobody collects orphans it stays, dead

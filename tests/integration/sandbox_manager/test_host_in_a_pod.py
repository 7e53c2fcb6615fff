"""An env host that shares no folder with its manager: a pod, its terminal is the line."""

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from kube_api import NAMESPACE, KubeApi
from sandbox_drivers import KUBERNETES, kubernetes_driver

from openforge.env.contract import EnvCallResult, LlmArgs
from openforge.sandbox.contract import Box
from openforge.sandbox.kubernetes import KubernetesDriver
from openforge.sandbox.kubernetes.pod import PodSettings
from openforge.sandbox_manager.env_host.keeper import HostKeeper, HostLost
from openforge.sandbox_manager.env_host.view import python_folders
from openforge.sandbox_manager.settings import Settings

ENVIRONMENT = """
import os
from openforge.env.contract import EnvCallResult

HARNESSES = {"loud": "pipeline", "dies": "pipeline"}

def tasks():
    return []

def create_env(sandbox, *, harness, **options):
    return Loud(sandbox, harness)

class Loud:
    def __init__(self, sandbox, harness):
        self.sandbox, self.harness = sandbox, harness

    async def run(self, *, instruction, llm_args, **_):
        print("a harness that prints", "\\n" * 1000, flush=True)
        if self.harness == "dies":
            raise SystemExit("out of ink")
        await self.sandbox.put("/workspace/words", bytes(range(256)) * 400)
        ended = await self.sandbox.exec("wc -c < words", timeout_s=30)
        return EnvCallResult(status="finished", metrics={"bytes": float(ended.stdout)})
"""
LLM = LlmArgs(
    base_url="http://127.0.0.1:8080/ep/e.0/v1",
    api_key="k",
    model="policy",
    temperature=1.0,
    top_p=1.0,
    max_tokens=8,
    stop=(),
)


@asynccontextmanager
async def pods(folder: Path, environment: str) -> AsyncIterator[KubernetesDriver]:
    """A cluster whose pods show this machine's Python, each folder as the image of its own that it would be."""
    made = await kubernetes_driver(folder, None, None)
    api: KubeApi = made.api  # type: ignore[attr-defined]
    shown, _ = python_folders(environment)
    images = {place: f"folder-{number}:1" for number, place in enumerate(shown)}
    api.image_volumes |= {image: Path(place) for place, image in images.items()}
    driver = KubernetesDriver(
        PodSettings(toolbox="toolbox:1", tools=images),
        owner=f"test-{secrets.token_hex(3)}",
        namespace=NAMESPACE,
        kubeconfig=str(folder / "kubeconfig"),
        image="box:1",
    )
    await driver.start()
    try:
        yield driver
    finally:
        await driver.close()
        await made.close()


async def run(hosts: HostKeeper, box: Box, harness: str) -> EnvCallResult:
    return await hosts.run(box, harness=harness, options={}, instruction="write", llm_args=LLM)


async def test_a_pipeline_works_over_the_terminal_of_its_pod_and_its_end_is_told_in_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    place = tmp_path / "loud" / "env.py"
    place.parent.mkdir()
    place.write_text(ENVIRONMENT)
    environment = str(place.parent)
    settings = Settings(run="r", home=tmp_path, sockets=tmp_path, env_host_cpus=1.0, env_host_memory_mb=512)
    async with pods(tmp_path, environment) as driver:
        box = await driver.create(KUBERNETES.spec("box"))
        hosts = HostKeeper(driver, environment, settings, {"run": "r"})
        first = await run(hosts, box, "loud")
        assert first.metrics == {"bytes": 256 * 400}
        with pytest.raises(HostLost, match="out of ink"):
            await run(hosts, box, "dies")
        assert (await run(hosts, box, "loud")).status == "finished"
        await hosts.close()
        await box.stop()

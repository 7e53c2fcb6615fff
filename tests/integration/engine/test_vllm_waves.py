"""Two engine services with a real vLLM server each take adapters in waves. `make test-vllm`."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest
from engine_fixtures import publish_adapters
from engine_pair import RUN, engine, one_after_another, served, tell
from reference_model import largest_difference
from vllm_world import NEAR, PROMPT, Server, spans, stated

from openforge.bus import Bus, BusSettings
from openforge.bus.server import free_port
from openforge.models import get
from openforge.runs import RunConfig, submit
from openforge.runs.config import EngineSection, EnvironmentSection, ModelSection, RunSection
from openforge.wire.generate import GenerateResponse

pytestmark = pytest.mark.vllm

PATIENCE_S = 1800.0


async def test_servers_take_adapters_one_after_another_and_each_answer_is_of_the_adapters_that_it_names(
    bus: Bus, bus_settings: BusSettings, tmp_path: Path
) -> None:
    model, wholes = get("smollm2-135m"), [tmp_path / f"whole-{version}" for version in range(3)]
    published = [
        publish_adapters(tmp_path / "weights", model, version, whole, "all-linear")
        for version, whole in enumerate(wholes)
    ]
    await submit(bus, _run(model))
    urls = {name: f"http://127.0.0.1:{free_port()}" for name in ("a", "b")}
    interpreter = os.environ.get("OPENFORGE_VLLM_PYTHON", "")
    await tell(bus, published[0], 0)
    async with contextlib.AsyncExitStack() as stack:
        for count, (name, url) in enumerate(urls.items(), 1):  # both starting at once would take each twice as long
            await stack.enter_async_context(engine(name, url, bus_settings, interpreter))
            await served(bus, 0, PATIENCE_S, count)
        async with _asked_all_the_time(urls, wholes) as answers:
            for version in (1, 2):
                await tell(bus, published[version], version)
                assert one_after_another(await served(bus, version, PATIENCE_S))
    for server, told in answers.values():
        versions = [version for _, answer in told for version, _, _ in spans(answer)]
        assert versions == sorted(versions), "no server goes back"
        assert (versions[0], versions[-1]) == ("0", "2")
        for ids, answer in _telling(told):
            sampled, logprobs = answer.choices[0].token_ids, stated(answer)
            for version, start, end in spans(answer):
                truth = server.truth(int(version), ids, sampled)
                assert largest_difference(logprobs[start:end], truth[start:end]) < NEAR


def _run(model: Path) -> RunConfig:
    return RunConfig(
        run=RunSection(name=RUN, steps=3),
        model=ModelSection(path=str(model), context=512),
        engine=EngineSection(kind="vllm", dtype="float32", max_requests=4, vllm_args=("--enforce-eager",)),
        environment=EnvironmentSection(name="letters", harness="letters"),
    )


Asked = tuple[list[int], GenerateResponse]


@contextlib.asynccontextmanager
async def _asked_all_the_time(
    urls: dict[str, str], models: list[Path]
) -> AsyncIterator[dict[str, tuple[Server, list[Asked]]]]:
    """One request after another to each server: the block begins when each has answered, and each answers once more
    when it has ended."""
    ending = asyncio.Event()
    async with contextlib.AsyncExitStack() as stack:
        answers = {
            name: (
                Server(await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=PATIENCE_S)), models),
                list[Asked](),
            )
            for name, url in urls.items()
        }
        async with asyncio.TaskGroup() as group:
            for server, told in answers.values():
                group.create_task(_ask(server, told, ending.is_set))
            while not all(told for _, told in answers.values()):
                await asyncio.sleep(0.1)
            yield answers
            ending.set()


async def _ask(server: Server, told: list[Asked], ends: Callable[[], bool]) -> None:
    last = False
    while not last:
        last = ends()
        ids = [*PROMPT, 500 + len(told)]
        told.append((ids, await server.generate(ids, max_tokens=24, ignore_eos=True)))


def _telling(told: list[Asked]) -> list[Asked]:
    """The first and the last, and all that more than one version sampled."""
    return [told[0], *(one for one in told[1:-1] if len(spans(one[1])) > 1), told[-1]]

"""Dashboard and alerts find their numbers in what a real Prometheus took from a real exporter and a real service."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
from fact_examples import FACTS
from needed import needs
from pretend_run import PretendRun, Weather
from prometheus import PROMETHEUS, Server, prometheus

from openforge.bus import Bus, BusSettings
from openforge.bus.server import free_port
from openforge.cli.dashboard import PANELS
from openforge.protos import EpisodeRequested, Fact
from openforge.runs import RunConfig, submit
from openforge.runs.metrics import ENOUGH
from openforge.service.metrics import LISTEN, PROCESS, Process, set_up_metrics

pytestmark = needs(PROMETHEUS)

CONFIG = msgspec.convert(
    {
        "run": {"name": "r", "steps": 5},
        "model": {"path": "/m"},
        "environment": {"name": "shell", "harness": "mini"},
        "pacing": {"groups_per_step": 2, "group_size": 4, "in_flight": 24},
        "evaluation": {"heldout_episodes": 3},
    },
    RunConfig,
)
assert CONFIG.run.steps * CONFIG.pacing.groups_per_step * CONFIG.pacing.group_size >= ENOUGH


def facts() -> Iterator[Fact]:
    """A run that is over, and one of every fact of another one."""
    for _, fact in PretendRun(CONFIG, Weather(failing=0.2, seed=2)).run().facts:
        yield fact
    yield from (fact for fact in FACTS if fact.kind != "run")
    (request,) = (fact for fact in FACTS if isinstance(fact, EpisodeRequested))
    yield msgspec.structs.replace(request, episode="g000013-0")  # which waits for a box


@contextmanager
def service() -> Iterator[str]:
    metrics = set_up_metrics("proxy", {LISTEN: "127.0.0.1:0"})
    assert metrics is not None
    metrics.expose(PROCESS, Process().numbers)
    yield metrics.url
    metrics.close()


@asynccontextmanager
async def exporter(url: str) -> AsyncIterator[str]:
    listen = f"127.0.0.1:{free_port()}"
    command = (sys.executable, "-m", "openforge.cli", "metrics", "--listen", listen)
    env = os.environ | {"OPENFORGE_NATS_URL": url}
    process = await asyncio.create_subprocess_exec(*command, env=env, stdout=asyncio.subprocess.DEVNULL)
    try:
        yield listen
    finally:
        process.terminate()
        await process.wait()


async def one_dead_letter(bus: Bus) -> None:
    """Somebody publishes what is no fact, and a reader gives it up."""
    await bus.link.js.publish("of.demo.turn.g-0.0.1", b"\xc1")
    async for _ in bus.follow(("turn",), until_now=True):
        pass


async def silent(server: Server, expressions: set[str]) -> set[str]:
    """Those to which Prometheus has no answer."""
    return {one for one in expressions if not (await server.asked("query", query=one))["result"]}


async def rules(server: Server) -> list[dict[str, Any]]:
    return [rule for group in (await server.asked("rules"))["groups"] for rule in group["rules"]]


async def firing(server: Server) -> list[dict[str, str]]:
    return [alert["labels"] for alert in (await server.asked("alerts"))["alerts"] if alert["state"] == "firing"]


async def test_every_panel_shows_something_and_every_rule_can_be_computed(
    bus: Bus, bus_settings: BusSettings, tmp_path: Path
) -> None:
    await submit(bus, CONFIG)
    await bus.tell_all(facts())
    await one_dead_letter(bus)
    expressions = {expression for row in PANELS.values() for panel in row for expression in panel.shows}
    waiting = {expression.replace("$run", ".*") for expression in expressions}
    with service() as own:
        async with exporter(bus_settings.url) as streams, asyncio.timeout(300):
            targets = {"openforge": streams, "openforge-services": httpx.URL(own).netloc.decode()}
            async with prometheus(tmp_path, targets) as server:
                while waiting := await silent(server, waiting):
                    await asyncio.sleep(0.5)
                while "OpenForgeDeadLetters" not in {labels["alertname"] for labels in await firing(server)}:
                    await asyncio.sleep(0.5)
                computed, fired = await rules(server), await firing(server)
    assert {rule["name"]: rule["lastError"] for rule in computed if rule["health"] != "ok"} == {}
    assert [labels for labels in fired if labels.get("run") == "r"] == []  # it ended well

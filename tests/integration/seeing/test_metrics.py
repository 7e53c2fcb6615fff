"""Metrics as Prometheus and a collector get them, over the wire."""

import asyncio
import os
import re
import sys
from pathlib import Path

import httpx
import msgspec
from credentials_world import world_at
from otlp_collector import collecting
from pretend_run import PretendRun, Weather

from openforge.bus import Bus, BusSettings
from openforge.bus.permissions import OPERATOR
from openforge.bus.server import free_port
from openforge.protos import RunSubmitted
from openforge.runs import RunConfig, submit
from openforge.runs.metrics import METRICS
from openforge.service.metrics import LISTEN, PROCESS, Process, set_up_metrics

CONFIG = msgspec.convert(
    {
        "run": {"name": "r", "steps": 3},
        "model": {"path": "/m"},
        "environment": {"name": "shell", "harness": "mini"},
        "pacing": {"groups_per_step": 2, "group_size": 3, "in_flight": 24},
    },
    RunConfig,
)


async def text_with(url: str, wanted: str) -> str:
    async with httpx.AsyncClient() as http:
        while True:
            try:
                text = (await http.get(url)).text
            except httpx.TransportError:
                text = ""
            if wanted in text:
                return text
            await asyncio.sleep(0.2)


async def test_a_run_is_seen_by_prometheus_and_by_a_collector(bus: Bus, bus_settings: BusSettings) -> None:
    await submit(bus, CONFIG)
    await bus.tell(RunSubmitted(run="of-another-release", generation=0, config="{}", config_digest="ab" * 32))
    await bus.tell_all(fact for _, fact in PretendRun(CONFIG, Weather(seed=2)).run().facts)
    listen = f"127.0.0.1:{free_port()}"
    with collecting() as collector:
        env = os.environ | {
            "OPENFORGE_NATS_URL": bus_settings.url,
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "OTEL_METRIC_EXPORT_INTERVAL": "200",
        }
        command = (sys.executable, "-m", "openforge.cli", "metrics", "--listen", listen)
        process = await asyncio.create_subprocess_exec(*command, env=env, stdout=asyncio.subprocess.DEVNULL)
        try:
            async with asyncio.timeout(60):
                text = await text_with(f"http://{listen}/metrics", 'openforge_trained_version{run="r"} 3.0')
                while "openforge_trained_version" not in collector.metrics.get("openforge-metrics", ()):
                    await asyncio.sleep(0.1)
        finally:
            process.terminate()
            await process.wait()
    shown = set(re.findall(r"^(openforge_\w+)", text, re.MULTILINE))
    named = {f"{name}_total" if metric.kind == "counter" else name for name, metric in METRICS.items()}
    assert shown <= named
    assert "of-another-release" not in text
    assert {"openforge_weight_debt", "openforge_episodes_total", "openforge_attempts"} <= shown
    assert collector.metrics["openforge-metrics"] <= set(METRICS)


async def test_a_service_shows_its_own_numbers() -> None:
    metrics = set_up_metrics("proxy", {LISTEN: "127.0.0.1:0"})
    assert metrics is not None
    process = Process()
    measuring = asyncio.create_task(process.keep_measuring())
    metrics.expose(PROCESS, process.numbers)
    async with asyncio.timeout(10):
        text = await text_with(metrics.url, "openforge_ready ")
    measuring.cancel()
    metrics.close()
    assert "openforge_loop_lag_seconds " in text
    assert set_up_metrics("proxy", {}) is None


async def test_an_exporter_that_may_only_read_tells_of_a_message_that_is_no_fact(tmp_path: Path) -> None:
    async with world_at(tmp_path) as world:
        async with world.bus(OPERATOR) as bus:
            await bus.set_up()
            await submit(bus, CONFIG)
            await bus.link.js.publish("of.r.turn.g-0.0.1", b"\xc1")
        seed = {
            "OPENFORGE_NATS_URL": world.server.url,
            "OPENFORGE_NATS_NKEY_SEED_FILE": str(world.credentials.seed("metrics")),
        }
        for told in (set(), {"metrics"}):  # it looks at dead letters before it reads
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "openforge.cli", "metrics", "--once"),
                env=os.environ | seed,
                stdout=asyncio.subprocess.PIPE,
            )
            said, _ = await process.communicate()
            assert process.returncode == 0
            numbers = [msgspec.json.decode(line) for line in said.splitlines()]
            assert {"openforge_running", "openforge_steps_wanted"} <= {number["name"] for number in numbers}
            dead = {number["labels"]["service"] for number in numbers if number["name"] == "openforge_dead_letters"}
            assert dead == told

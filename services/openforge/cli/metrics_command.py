"""`openforge metrics`: the streams as numbers, for Prometheus and OTLP."""

import asyncio
import os
import threading
from collections.abc import Iterator, Mapping
from typing import Annotated

import msgspec
import typer

from openforge.bus import CAUGHT_UP, BadSettings, Bus
from openforge.cli.reach import BAD_USE, fail, run_on_bus
from openforge.protos import Fact
from openforge.runs import BadRunFile
from openforge.runs.metrics import METRICS, RunMetrics, Sample
from openforge.service.log import log
from openforge.service.metrics import LISTEN, Instrument, Numbers, set_up_metrics

FOLDED = ("run", "group", "episode", "turn", "trajectory", "policy")
_DEAD_EVERY_S = 15.0
INSTRUMENTS = tuple(Instrument(name, metric.kind, metric.help) for name, metric in METRICS.items())


class Exporter:
    """All runs that were told of, folded in one thread and looked at from others. A run file that cannot be read, as of
    another release, costs its own run's numbers and no other's.
    """

    def __init__(self) -> None:
        self._runs: dict[str, RunMetrics] = {}
        self._unreadable: set[str] = set()
        self._dead: Mapping[str, int] = {}
        self._lock = threading.Lock()

    async def follow(self, bus: Bus, run: str, *, until_now: bool = False) -> None:
        await self.look_at_the_dead(bus)
        async for told in bus.follow(FOLDED, run=run, until_now=until_now):
            if told is not CAUGHT_UP and told.fact.run not in self._unreadable:
                with self._lock:
                    self._fold(told.fact, told.at)

    def _fold(self, fact: Fact, at: float) -> None:
        try:
            self._runs.setdefault(fact.run, RunMetrics(fact.run)).apply(fact, at)
        except BadRunFile as problem:
            log.error("no numbers of a run", run=fact.run, why=str(problem))
            self._unreadable.add(fact.run)
            del self._runs[fact.run]

    async def keep_looking_at_the_dead(self, bus: Bus) -> None:
        while True:
            await asyncio.sleep(_DEAD_EVERY_S)
            await self.look_at_the_dead(bus)

    async def look_at_the_dead(self, bus: Bus) -> None:
        dead: dict[str, int] = {}
        for letter in await bus.dead_letters():
            dead[letter.service] = dead.get(letter.service, 0) + 1
        self._dead = dead

    def numbers(self) -> Numbers:
        with self._lock:
            return list(self._numbers())

    def _numbers(self) -> Iterator[tuple[str, float, dict[str, str]]]:
        for service, letters in self._dead.items():
            yield "openforge_dead_letters", float(letters), {"service": service}
        for run, metrics in self._runs.items():
            for sample in metrics.samples():
                yield sample.name, float(sample.value), {"run": run} | _labels(sample)


def _labels(sample: Sample) -> dict[str, str]:
    return dict(zip(METRICS[sample.name].labels, sample.labels, strict=True))


def metrics(
    run: Annotated[str, typer.Argument(help="The run's name; * is every run of the bus.")] = "*",
    listen: Annotated[str, typer.Option(help="Where Prometheus looks: HOST:PORT.", envvar=LISTEN)] = "127.0.0.1:9464",
    once: Annotated[bool, typer.Option("--once", help="Print one JSON object a number and end.")] = False,
) -> None:
    """Show what the streams say, in numbers: at http://HOST:PORT/metrics, and over OTLP where the environment has
    OTEL_EXPORTER_OTLP_ENDPOINT. Ctrl-C ends it. docs/observability.md has the names.
    """
    exporter = Exporter()

    async def show(bus: Bus) -> None:
        if once:
            await exporter.follow(bus, run, until_now=True)
            for name, value, labels in exporter.numbers():
                typer.echo(msgspec.json.encode({"name": name, "value": value, "labels": labels}).decode())
            return
        async with asyncio.TaskGroup() as group:
            group.create_task(exporter.follow(bus, run))
            group.create_task(exporter.keep_looking_at_the_dead(bus))

    shown = None
    try:
        if not once:
            shown = set_up_metrics("metrics", dict(os.environ) | {LISTEN: listen})
            if shown is None:
                fail("metrics need more packages: install openforge[seeing]", BAD_USE)
            shown.expose(INSTRUMENTS, exporter.numbers)
            typer.echo(shown.url)
        run_on_bus(None if run == "*" else run, show, "metrics")
    except BadSettings as error:
        fail(str(error), BAD_USE)
    finally:
        if shown is not None:
            shown.close()

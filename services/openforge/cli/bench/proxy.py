"""What the proxy adds to a model call, beside other projects' proxies: `openforge bench proxy --json`.

Conversations grow from 6,000 to 10,000 tokens by about 400 a turn, each with text of its own; each answer has 200
sampled tokens with their log-probs. `direct` asks a stub engine over its wire, `proxy` asks a proxy in front of the
same stub; ours has a real nats-server behind it and answers when the turn is stored. Load, stub, proxy and
nats-server share this machine. A proxy is one Python process, which has one core: in one more row `--processes` of
ours share a port, as a user starts them who has the cores. `floor` is what no proxy of this kind can do without, with
as many processes: to read a call, to ask the engine, to store a record, to answer.

`stored_bytes_per_turn` is what the stream of turns holds, subjects and headers included, divided by its messages: the
first prompt of an episode, 6,000 tokens as text and as ids, is a tenth of the turns and counted in. Words are drawn
evenly from 2,000, and log-probs have random bits: neither packs as well as what people and models write.

Promises: direct calls and calls through a proxy take turns, so that both see the same machine; first turns of an
episode are counted apart; every figure is the median of the repeats, which are all in the report; a peer that could
not be measured is a row with the reason.
"""

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from openforge.bus import Bus, BusSettings
from openforge.bus.server import NatsServer, ServerConfig, free_port
from openforge.bus.streams import stream_of
from openforge.cli.bench._peers import NotMeasured, installed
from openforge.cli.bench._proxy_load import BadAnswer, Engine, Spent, Target, load, names, percentile
from openforge.cli.bench._proxy_peers import PEERS, Peer, peer_process
from openforge.cli.bench._proxy_processes import cpu_s, floor_processes, proxy_processes, rss_mb, stub_process
from openforge.cli.bench._proxy_text import FIRST_TOKENS, GROWTH_TOKENS, TURNS, Conversation, model_folder
from openforge.protos import KEY_BUCKET, AttemptKey, EndReason, EpisodeEnded, key_entry
from openforge.runs import config_of, submit

RUN = "bench"
AT_ONCE = 16
MEMORY_CALLS = 10_000
_MEMORY_PARTS = 10
_SAMPLED_TOKENS = 200
_WINDOW = 32_000
_GENERATE, _COMPLETE = "/inference/v1/generate", "/v1/chat/completions"


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """`calls` are those of one repeat, one at a time; sixteen at once make four times as many."""

    calls: int = 400
    repeats: int = 5
    processes: int = 2
    chunks: int = 1
    memory_calls: int = MEMORY_CALLS
    peers: Path | None = None


class Repeat(msgspec.Struct, kw_only=True):
    """Milliseconds, calls a second, and CPU milliseconds of the proxy's processes a call."""

    added_ms_p50_c1: float
    added_ms_p99_c1: float
    cold_ms_p50: float
    direct_ms_p50_c1: float
    calls_per_s_c16: float
    ms_p50_c16: float
    cpu_ms_c1: float
    cpu_ms_c16: float


class Row(msgspec.Struct, kw_only=True):
    """One proxy. `reason`: why there are no figures; `note`: how it was set up."""

    name: str
    note: str = ""
    figures: dict[str, float] = {}
    repeats: list[Repeat] = []
    processes: int = 1
    rss_mb: float | None = None
    reason: str = ""


# -- one proxy


Prepare = Callable[[Sequence[str]], Awaitable[None]]
Ended = Callable[[str], Awaitable[None]]


class Bench(msgspec.Struct, kw_only=True):
    """One proxy under load: what it is, what has to be there before an episode, what happens after it."""

    target: Target
    pids: list[int]
    engine: Engine
    prepare: Prepare
    ended: Ended
    label: str = ""

    async def repeat(self, name: str, calls: int) -> Repeat:
        one, one_cpu_ms = await self.loaded(f"{name}-c1", 1, calls, self.engine)
        many, many_cpu_ms = await self.loaded(f"{name}-c16", AT_ONCE, 4 * calls)
        direct = percentile(one.direct, 50)
        return Repeat(
            added_ms_p50_c1=round(percentile(one.later, 50) - direct, 3),
            added_ms_p99_c1=round(percentile(one.later, 99) - percentile(one.direct, 99), 3),
            cold_ms_p50=round(percentile(one.first, 50) - percentile(one.direct_first, 50), 3),
            direct_ms_p50_c1=round(direct, 3),
            calls_per_s_c16=round(many.calls / many.wall_s, 1),
            ms_p50_c16=round(percentile(many.later, 50), 3),
            cpu_ms_c1=one_cpu_ms,
            cpu_ms_c16=many_cpu_ms,
        )

    async def loaded(
        self, name: str, concurrency: int, calls: int, engine: Engine | None = None
    ) -> tuple[Spent, float]:
        """What the calls took, and the proxy's CPU milliseconds for each."""
        each = max(1, calls // concurrency // TURNS)
        await self.prepare([episode for worker in range(concurrency) for episode in names(name, worker, each)])
        before_s = cpu_s(self.pids)
        spent = await load(self.target, name, concurrency, calls, self.ended, engine)
        return spent, round((cpu_s(self.pids) - before_s) * 1e3 / spent.calls, 3)

    async def row(self, name: str, options: Options) -> Row:
        form = f"{self.label}{'streamed' if self.target.stream else 'whole'}"
        await self.loaded(f"warm-{form}", AT_ONCE, options.calls)
        repeats = [await self.repeat(f"{form}-{number}", options.calls) for number in range(options.repeats)]
        figures = {
            field: statistics.median(getattr(repeat, field) for repeat in repeats) for field in Repeat.__struct_fields__
        }
        return Row(name=name, figures=figures, repeats=repeats, processes=len(self.pids), rss_mb=rss_mb(self.pids))

    async def memory(self, calls: int) -> tuple[int, list[float]]:
        """How many calls were made, at least `calls`, and the proxy's resident megabytes before and meanwhile."""
        sizes, made = [rss_mb(self.pids)], 0
        episodes = -(-calls // (AT_ONCE * TURNS))
        parts = min(_MEMORY_PARTS, episodes)
        for part in range(parts):
            each = episodes * (part + 1) // parts - episodes * part // parts
            spent, _ = await self.loaded(f"memory-{part}", AT_ONCE, each * AT_ONCE * TURNS)
            made += spent.calls
            sizes.append(rss_mb(self.pids))
        return made, sizes


def generate_bodies() -> list[bytes]:
    """What our proxy asks the engine for in each turn of an episode."""
    prompts = [[300 + index % 2000 for index in range(FIRST_TOKENS + GROWTH_TOKENS * turn)] for turn in range(TURNS)]
    return [
        msgspec.json.encode(
            {
                "model": "policy",
                "token_ids": prompt,
                "sampling_params": {"max_tokens": _SAMPLED_TOKENS, "logprobs": 0},
                "return_token_ids": True,
                "stream": True,
            }
        )
        for prompt in prompts
    ]


def complete_bodies() -> list[bytes]:
    """What a client of Chat Completions asks the engine for in each turn of an episode."""
    conversation = Conversation("direct")
    bodies = []
    for _ in range(TURNS):
        asked = {"model": "m", "messages": conversation.messages, "logprobs": True, "return_token_ids": True}
        bodies.append(msgspec.json.encode(asked))
        conversation.goes_on("direct " * _SAMPLED_TOKENS)
    return bodies


# -- ours


@asynccontextmanager
async def own_proxy(
    bus: Bus,
    folder: Path,
    nats_url: str,
    engine_port: int,
    run: str = RUN,
    more: Mapping[str, str] = {},
    processes: int = 1,
) -> AsyncIterator[Bench]:
    """A proxy of ours, of one process or several, for a run that was submitted; `more` is added to its environment."""
    bucket = await bus.bucket(KEY_BUCKET)

    async def keys(episodes: Sequence[str]) -> None:
        for episode in episodes:
            entry = AttemptKey(
                run=run, episode=episode, attempt=0, turns=99, tokens_per_turn=999, expires_at=time.time() + 99_999
            )
            await bucket.put(key_entry(run, f"of-{episode}"), entry.encode())

    async def ended(episode: str) -> None:
        await bus.tell(EpisodeEnded(run=run, episode=episode, attempt=0, reason=EndReason.FINISHED))

    async with proxy_processes(processes, run, folder, nats_url, engine_port, more) as (port, pids):
        target = Target(
            port=port, path="/ep/{episode}.0/v1/chat/completions", headers={"Authorization": "Bearer of-{episode}"}
        )
        engine = Engine(engine_port, generate_bodies(), _GENERATE)
        yield Bench(target=target, pids=pids, engine=engine, prepare=keys, ended=ended)


async def ours(bus: Bus, folder: Path, nats_url: str, engine_port: int, options: Options) -> dict[str, Any]:
    async with own_proxy(bus, folder, nats_url, engine_port) as whole:
        streamed = msgspec.structs.replace(whole, target=msgspec.structs.replace(whole.target, stream=True))
        rows = [await whole.row("openforge", options), await streamed.row("openforge, streamed", options)]
        calls, sizes = await whole.memory(options.memory_calls)
    stored = await bus.link.js.stream_info(stream_of("turn"))
    async with own_proxy(bus, folder, nats_url, engine_port, processes=options.processes) as many:
        many.label = "many-"
        rows.append(await many.row(f"openforge, {options.processes} processes", options))
    for row in rows:
        row.note = "every turn stored in a stream before its answer ends"
    return {
        "rows": rows,
        "floor": await _floor(nats_url, engine_port, options),
        "stored_bytes_per_turn": round(stored.state.bytes / stored.state.messages, 1),
        "memory_calls": calls,
        "rss_mb": sizes,
    }


async def _floor(nats_url: str, engine_port: int, options: Options) -> Row:
    async with floor_processes(options.processes, nats_url, engine_port) as (port, pids):
        engine = Engine(engine_port, generate_bodies(), _GENERATE)
        target = Target(port=port, path="/v1/chat/completions")
        bench = Bench(target=target, pids=pids, engine=engine, prepare=_nothing, ended=_nothing)
        row = await bench.row("floor", options)
    row.note = "reads the call, asks the engine, stores 3 kB, answers what was made before"
    return row


async def submitted(bus: Bus, model: Path, run: str = RUN) -> None:
    said = {
        "run": {"name": run, "steps": 1},
        "model": {"path": str(model), "context": _WINDOW},
        "sampling": {"max_tokens": 2 * _SAMPLED_TOKENS},
        "environment": {"name": "shell", "harness": "mini"},
    }
    await submit(bus, config_of(msgspec.json.encode(said).decode()))


# -- peers


async def peer_row(peer: Peer, folder: Path, engine_port: int, options: Options) -> Row:
    if options.peers is None:
        return Row(name=peer.title, reason="not asked for: --peers FOLDER installs and measures it")
    try:
        python = await installed(peer.name, peer.version, (peer.requirement,), options.peers)
        async with peer_process(peer, python, folder, engine_port) as (target, pid):
            engine = Engine(engine_port, complete_bodies(), _COMPLETE)
            bench = Bench(target=target, pids=[pid], engine=engine, prepare=_nothing, ended=_nothing)
            return msgspec.structs.replace(await bench.row(peer.title, options), note=peer.note)
    except (NotMeasured, BadAnswer) as error:
        return Row(name=peer.title, reason=str(error))


async def _nothing(_: object) -> None:
    return


# -- the report


class Stage(msgspec.Struct, frozen=True):
    """What stands around a proxy: a bus, a stub engine, a model's folder."""

    bus: Bus
    folder: Path
    nats_url: str
    engine_port: int
    model: Path


@asynccontextmanager
async def stage(chunks: int) -> AsyncIterator[Stage]:
    with tempfile.TemporaryDirectory(prefix="of-bench-") as name:
        folder = Path(name)
        model = model_folder(folder / "model")
        server = NatsServer(ServerConfig(folder=str(folder / "nats"), port=free_port()))
        await server.start()
        try:
            async with (
                stub_process(model, chunks) as engine_port,
                Bus.connect(BusSettings(url=server.url), name="bench") as bus,
            ):
                await bus.set_up()
                yield Stage(bus, folder, server.url, engine_port, model)
        finally:
            await server.stop()


async def bench(options: Options) -> dict[str, Any]:
    load_before = os.getloadavg()[0]
    async with stage(options.chunks) as on:
        await submitted(on.bus, on.model)
        own = await ours(on.bus, on.folder, on.nats_url, on.engine_port, options)
        others = [await peer_row(peer, on.folder, on.engine_port, options) for peer in PEERS]
    return report(own, others, options) | {"machine": machine(load_before)}


def report(own: Mapping[str, Any], others: Sequence[Row], options: Options) -> dict[str, Any]:
    whole, many, floor = own["rows"][0], own["rows"][-1], own["floor"]
    sizes: list[float] = own["rss_mb"]
    best = max((row.figures["calls_per_s_c16"] for row in others if row.figures), default=None)
    wanted = ("added_ms_p50_c1", "added_ms_p99_c1", "cold_ms_p50")
    return {
        **{field: whole.figures[field] for field in wanted},
        "calls_per_s_c16": whole.figures["calls_per_s_c16"],
        "calls_per_s_c16_many": many.figures["calls_per_s_c16"],
        "many": many.processes,
        "floor_calls_per_s_c16": floor.figures["calls_per_s_c16"],
        "floor_added_ms_p50_c1": floor.figures["added_ms_p50_c1"],
        "best_peer_calls_per_s_c16": best,
        "stored_bytes_per_turn": own["stored_bytes_per_turn"],
        "rss_growth_mb_10k_calls": round(sizes[-1] - sizes[0], 1) if own["memory_calls"] >= MEMORY_CALLS else None,
        "memory": {"calls": own["memory_calls"], "rss_mb": sizes},
        "proxy_cpu_ms_per_call": whole.figures["cpu_ms_c16"],
        "calls": options.calls,
        "repeats": options.repeats,
        "engine_chunks": options.chunks,
        "rows": [*own["rows"], floor, *others],
    }


def machine(load_before: float) -> dict[str, Any]:
    return {
        "cpus": os.cpu_count(),
        "usable_cpus": len(os.sched_getaffinity(0)),
        "load_before": round(load_before, 2),
        "load_after": round(os.getloadavg()[0], 2),
        "platform": platform.platform(),
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="openforge bench proxy", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object and nothing else on stdout")
    parser.add_argument("--calls", type=int, default=400, help="calls of a repeat, one at a time; 16 at once: 4 times")
    parser.add_argument("--repeats", type=int, default=5, help="how often everything is measured")
    parser.add_argument("--processes", type=int, default=2, help="of our proxy at one port, in a row of their own")
    parser.add_argument("--chunks", type=int, default=1, help="pieces in which the engine sends an answer")
    parser.add_argument("--memory-calls", type=int, default=MEMORY_CALLS, help="calls over which memory is watched")
    parser.add_argument("--peers", type=Path, help="measure other proxies too, installed into venvs in this folder")
    said = parser.parse_args()
    options = Options(
        calls=said.calls,
        repeats=said.repeats,
        processes=said.processes,
        chunks=said.chunks,
        memory_calls=said.memory_calls,
        peers=said.peers and said.peers.resolve(),
    )
    try:
        text = msgspec.json.encode(uvloop.run(bench(options)))
    except BadAnswer as error:
        raise SystemExit(f"openforge: our own proxy failed: {error}") from error
    print((text if said.json else msgspec.json.format(text, indent=2)).decode())


if __name__ == "__main__":
    main()

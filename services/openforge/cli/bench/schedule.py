"""How rules of pacing and staleness compare in virtual time: `python -m openforge.cli.bench.schedule --json`.

The true scheduler core and the true batcher decide; agents, engine and learner are pretended. Every rule sees the
same log-normal durations (median 1 s, p99/p50 = 10) for the same groups; a batch of 8 groups of 8 takes 1 s to train.

`throughput_vs_bound`: episodes trained in the time that max(generation, training) would take, over the time it took;
`updates_vs_bound`: the same for committed batches, which differs where batches grow. `length_bias`: loss tokens of a
trained episode over tokens of a finished one, in the mean; below 1, long work is missing. `lag_max` is what was seen.
`whole_group_limit`: no rule that trains every group whole, within max_lag, in batches of one size can pass it.
`--stress N` runs N episodes in random configurations with restarts and failures, and counts broken promises.
`--pressure` compares fixed bounds of open episodes with one that the engine's pressure moves (`_pressure.py`).
`--from-run RUN` draws durations and step times from a finished run and predicts the time that it took.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from openforge.bus import CAUGHT_UP, Bus
from openforge.cli.bench._pressure import pressure
from openforge.cli.bench._rules import RULES, Rule, Size, tallied
from openforge.cli.bench._world import Durations, Nature, Tally, World, as_it_was, log_normal, shuffled
from openforge.cli.reach import bus_of
from openforge.protos import BatchTrained, EpisodeRequested, GroupOpened, PolicyServed, TrajectoryVerified
from openforge.runs import RunConfig, config_of, state_of
from openforge.runs.names import group_of

SLOTS, LAGS = (32, 128, 512), (1, 2, 4, 8)
LIMIT_SAMPLE = 500
"""Batches from which the limit is estimated."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    rule: str
    max_lag: int
    slots: int
    batch: float
    slots_to_batch: float
    throughput_vs_bound: float
    updates_vs_bound: float
    lag_max: int
    discarded_share: float
    masked_share: float
    idle_share: float
    length_bias: float


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    max_lag: int
    slots: int
    whole_group_limit: float


# The table.


def rows(
    rules: Iterable[Rule], slots: Iterable[int], lags: Iterable[int], steps: int, seed: int
) -> Iterator[tuple[Row, list[str]]]:
    """Each rule at each size, with what it broke. A rule with one max_lag of its own is run once for each size."""
    asked = list(lags)
    for size in (Size(slots=count, steps=steps) for count in slots):
        for rule in rules:
            for lag in asked if rule.lag is None else (rule.lag,):
                nature = Nature(seed=seed, step_s=Nature().step_s * rule.scale)
                tally = tallied(rule, rule.sized(size), lag, log_normal(seed), nature)
                yield row_of(rule, size, lag, tally), tally.broken


def row_of(rule: Rule, size: Size, max_lag: int, tally: Tally) -> Row:
    mean_s = tally.offered_s / tally.offered_episodes
    episode_s = max(mean_s / size.slots, Nature().step_s / size.batch)
    batch = tally.trained_episodes / tally.batches
    return Row(
        rule=rule.name,
        max_lag=max_lag,
        slots=size.slots,
        batch=round(batch, 1),
        slots_to_batch=round(size.slots / batch, 3),
        throughput_vs_bound=round(tally.trained_episodes * episode_s / tally.ended_s, 3),
        updates_vs_bound=round(tally.batches * size.batch * episode_s / tally.ended_s, 3),
        lag_max=max(tally.lags),
        discarded_share=round(tally.discarded_tokens / tally.offered_tokens, 3),
        masked_share=round(tally.masked_tokens / tally.offered_tokens, 3),
        idle_share=round(1 - tally.busy_s / (size.slots * tally.ended_s), 3),
        length_bias=round(
            (tally.trained_tokens / tally.trained_episodes) / (tally.offered_tokens / tally.offered_episodes), 3
        ),
    )


def limit(durations: Durations, size: Size, max_lag: int) -> Limit:
    """What no rule can pass that trains every group whole within max_lag = S, in batches of B groups.

    A group that started at version s is in batch s + S at the latest, so at any time at most (S + 1) * B groups wait
    or run, and by Little's law a step takes at least E[longest of a group] / (S + 1). Number the groups by their start
    and cut them into chunks of B: when n batches are taken, every untrained group has a number from (n - S) * B to
    (n + S + 1) * B, so of the chunks' longest groups at most 2 * S + 1 run at once, and a step takes at least
    E[longest of B groups] / (2 * S + 1).
    """
    batches = [
        [durations(ordinal, size.members, 0) for ordinal in range(batch * size.groups, (batch + 1) * size.groups)]
        for batch in range(LIMIT_SAMPLE)
    ]
    mean_s = statistics.fmean(one for batch in batches for group in batch for one in group)
    group_s = statistics.fmean(max(group) for batch in batches for group in batch)
    batch_s = statistics.fmean(max(max(group) for group in batch) for batch in batches)
    bound_s = max(mean_s * size.batch / size.slots, Nature().step_s)
    least_s = max(bound_s, group_s / (max_lag + 1), batch_s / (2 * max_lag + 1))
    return Limit(max_lag=max_lag, slots=size.slots, whole_group_limit=round(bound_s / least_s, 3))


# A million episodes.


def stress(episodes: int, seed: int) -> dict[str, Any]:
    """At least so many episodes of the rules that promise a bound, in random worlds with failures and restarts."""
    rng = random.Random(seed)
    done = runs = restarts = 0
    broken: list[str] = []
    while done < episodes:
        config, nature = drawn(rng)
        tally = World(config, log_normal(nature.seed, p99_over_p50=rng.choice([1.5, 10.0, 30.0])), nature).run()
        done, runs, restarts = done + tally.episodes, runs + 1, restarts + nature.restarts
        broken += [f"{said} in {config.pacing} {nature}" for said in tally.broken]
    return {"episodes": done, "runs": runs, "restarts": restarts, "violations": len(broken), "broken": broken[:10]}


def drawn(rng: random.Random) -> tuple[RunConfig, Nature]:
    groups, members = rng.randint(1, 8), rng.randint(2, 8)
    said = {
        "run": {"name": "r", "steps": rng.randint(5, 80), "seed": rng.randint(0, 99)},
        "model": {"path": "/m"},
        "environment": {"name": "shell", "harness": "mini"},
        "pacing": {
            "groups_per_step": groups,
            "groups_per_step_most": groups * rng.choice([0, 0, 2, 8]),
            "group_size": members,
            "in_flight": rng.randint(members, 256),
            "max_lag": rng.randint(0, 8),
            "attempts": rng.randint(1, 4),
            "staleness": rng.choice(["drop", "wait", "mask"]),
            "wait_timeout_s": rng.choice([5.0, 1e9]),
            "dynamic_sampling": rng.random() < 0.3,
            "refills_per_step": rng.randint(0, 4),
        },
    }
    nature = Nature(
        seed=rng.randint(0, 2**31),
        step_s=rng.choice([0.1, 1.0, 5.0]),
        serve_s=rng.choice([0.0, 0.5]),
        failing=rng.choice([0.0, 0.02, 0.2]),
        restarts=rng.randint(0, 12),
    )
    return msgspec.convert(said, RunConfig), nature


# Against a real run.


class Recorded(msgspec.Struct, kw_only=True):
    """What a run's streams say of time. `took_s`: from the first training group to the last batch; `groups_s`: how long
    the members of each group took from request to verdict."""

    config: RunConfig
    groups_s: dict[str, list[float]] = {}
    steps_s: list[float] = []
    serves_s: list[float] = []
    took_s: float = 0.0


async def recorded(bus: Bus, run: str) -> Recorded:
    state = await state_of(bus, run)
    if state.phase == "absent":
        raise SystemExit(f"openforge: run {run!r} is not on this bus: name a run that has ended")
    result = Recorded(config=config_of(state.config))
    requested: dict[str, float] = {}
    verified: dict[str, float] = {}
    trained_at: dict[int, float] = {}
    began = ended = 0.0
    async for told in bus.follow(("group", "episode", "trajectory", "policy"), run=run, until_now=True):
        if told is CAUGHT_UP:
            continue
        match told.fact:
            case GroupOpened(purpose="train"):
                began = min(began or told.at, told.at)
            case EpisodeRequested(purpose="train") as fact:
                requested[f"{fact.episode}.{fact.attempt}"] = told.at
            case TrajectoryVerified(purpose="train") as fact:
                verified[f"{fact.episode}.{fact.attempt}"] = told.at
            case BatchTrained() as fact:
                trained_at[fact.version] = ended = told.at
                result.steps_s.append(fact.step_s)
            case PolicyServed() as fact if fact.version in trained_at:
                result.serves_s.append(told.at - trained_at.pop(fact.version))
            case _:
                pass
    for attempt, at in sorted(verified.items()):
        result.groups_s.setdefault(group_of(attempt), []).append(at - requested[attempt])
    result.took_s = ended - began
    return result


def calibrated(run: Recorded, seeds: int = 5) -> dict[str, Any]:
    """The time of the run beside that of the same run in virtual time: with each group's own durations, and with the
    same durations drawn each for itself, which forgets that one hour of a machine is not like another."""
    nature = Nature(step_s=statistics.fmean(run.steps_s), serve_s=statistics.fmean(run.serves_s))
    groups_s = [took_s for _, took_s in sorted(run.groups_s.items())]
    durations_s = [took_s for group_s in groups_s for took_s in group_s]
    predicted_s = World(run.config, as_it_was(groups_s), nature).run().ended_s
    shuffled_s = [
        World(run.config, shuffled(seed, durations_s), msgspec.structs.replace(nature, seed=seed)).run().ended_s
        for seed in range(seeds)
    ]
    return {
        "run": run.config.run.name,
        "steps": len(run.steps_s),
        "episodes": len(durations_s),
        "real_s": round(run.took_s, 2),
        "predicted_s": round(predicted_s, 2),
        "predicted_over_real": round(predicted_s / run.took_s, 3),
        "shuffled_s": round(statistics.fmean(shuffled_s), 2),
        "episode_s_mean": round(statistics.fmean(durations_s), 3),
        "step_s_mean": round(nature.step_s, 3),
        "serve_s_mean": round(nature.serve_s, 3),
    }


async def _calibrate(run: str) -> dict[str, Any]:
    async with bus_of(run) as bus:
        return calibrated(await recorded(bus, run))


# The command.


def report(options: argparse.Namespace) -> dict[str, Any]:
    if options.from_run:
        return {"calibration": asyncio.run(_calibrate(options.from_run))}
    if options.pressure:
        return {"pressure": pressure(options.seed)}
    if options.stress:
        return {"stress": stress(options.stress, options.seed)}
    sizes = [Size(slots=slots, steps=options.steps) for slots in options.slots]
    measured_rows: list[Row] = []
    broken: list[str] = []
    for row, said in rows(RULES, options.slots, options.max_lag, options.steps, options.seed):
        measured_rows.append(row)
        broken += [f"{row.rule}, max_lag {row.max_lag}, {row.slots} slots: {one}" for one in said]
        if not options.json:
            print(markdown(row, first=len(measured_rows) == 1), flush=True)
    limits = [limit(log_normal(options.seed), size, lag) for size in sizes for lag in options.max_lag]
    return {"rows": measured_rows, "limits": limits, "violations": len(broken), "broken": broken[:10]}


def markdown(row: Row, *, first: bool) -> str:
    names = list(Row.__struct_fields__)
    head = f"| {' | '.join(names)} |\n|{'---|' * len(names)}\n" if first else ""
    return head + "| " + " | ".join(str(getattr(row, name)) for name in names) + " |"


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="openforge bench schedule", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--slots", type=_numbers, default=list(SLOTS), help="episodes at once, with commas between")
    parser.add_argument("--max-lag", type=_numbers, default=list(LAGS), help="bounds, with commas between")
    parser.add_argument("--steps", type=int, default=40, help="batches of a run (default 40)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--stress", type=int, default=0, metavar="EPISODES", help="count broken promises instead")
    parser.add_argument("--pressure", action="store_true", help="compare bounds of open episodes instead")
    parser.add_argument("--from-run", default="", metavar="RUN", help="predict the time of a run that ended instead")
    options = parser.parse_args(arguments)
    result = report(options)
    if options.json:
        sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
    else:
        shown = {name: value for name, value in result.items() if name != "rows"}
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(shown), indent=2).decode() + "\n")
    bad = result.get("violations", 0) or result.get("stress", {}).get("violations", 0)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

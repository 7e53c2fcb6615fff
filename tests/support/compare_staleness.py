"""`drop`, `wait` and `mask` on the same runs in virtual time: prints the table of docs/pacing.md, for the lags that are
named or 0 1 2 4.

100 steps of 1 s, 8 groups of 4 a step, 64 slots, attempts of log-normal duration (median 1 s, p99/p50 = 10), 2 % of
attempts fail, the scheduler restarts three times; the mean over three seeds.
"""

import statistics
import sys

import msgspec
from pretend_run import PretendRun, Weather

from openforge.runs import Books, RunConfig

SEEDS = (1, 2, 3)
STEPS = 100


def simulated(staleness: str, max_lag: int, seed: int) -> PretendRun:
    said = {
        "run": {"name": "r", "steps": STEPS, "seed": seed},
        "model": {"path": "/m"},
        "environment": {"name": "shell", "harness": "mini"},
        "pacing": {
            "groups_per_step": 8,
            "group_size": 4,
            "in_flight": 64,
            "max_lag": max_lag,
            "staleness": staleness,
            "attempts": 5,
        },
    }
    weather = Weather(seed=seed, failing=0.02, spread=0.99, delay_s=0.02, restarts=3)
    return PretendRun(msgspec.convert(said, RunConfig), weather).run()


def closes(world: PretendRun) -> bool:
    books = Books("r")
    for _, fact in world.facts:
        books.apply(fact)
    return books.ledger().closes


def main() -> None:
    print("| max_lag | at the bound | s for 100 steps | slots idle | groups retired | trained / offered duration |")
    print("|---|---|---|---|---|---|")
    for max_lag in map(int, sys.argv[1:] or (0, 1, 2, 4)):
        for staleness in ("drop", "wait", "mask"):
            worlds = [simulated(staleness, max_lag, seed) for seed in SEEDS]
            assert not any(world.broken for world in worlds)
            assert all(closes(world) for world in worlds)
            opened = sum(len(world.opened("train")) for world in worlds)
            print(
                f"| {max_lag} | `{staleness}` | {statistics.mean(world.now for world in worlds):.0f} "
                f"| {statistics.mean(world.idle_share for world in worlds):.2f} "
                f"| {sum(world.evicted for world in worlds) / opened:.1%} "
                f"| {statistics.mean(world.trained_over_offered for world in worlds):.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()

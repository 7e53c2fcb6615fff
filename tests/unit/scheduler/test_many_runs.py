"""A hundred thousand episodes in bad weather: no promise is broken and every ledger closes."""

import random

import msgspec
import pytest
from pretend_run import PretendRun, Weather

from openforge.runs import Books, RunConfig

EPISODES = 100_000


def drawn(rng: random.Random) -> tuple[RunConfig, Weather]:
    run = {
        "run": {"name": "r", "steps": rng.randint(5, 60), "seed": rng.randint(0, 99)},
        "model": {"path": "/m"},
        "environment": {"name": "shell", "harness": "mini"},
        "pacing": {
            "groups_per_step": rng.randint(1, 8),
            "group_size": rng.randint(2, 8),
            "in_flight": rng.randint(8, 128),
            "max_lag": rng.randint(0, 8),
            "attempts": rng.randint(1, 4),
            "staleness": rng.choice(["drop", "wait", "mask"]),
            "dynamic_sampling": rng.random() < 0.3,
            "refills_per_step": rng.randint(0, 4),
        },
        "evaluation": {"heldout_episodes": rng.choice([0, 20])},
    }
    weather = Weather(
        seed=rng.randint(0, 2**31),
        failing=rng.choice([0.0, 0.05, 0.3]),
        same_reward=rng.choice([0.0, 0.4]),
        step_s=rng.choice([0.1, 1.0, 5.0]),
        spread=rng.choice([0.0, 0.9, 1.5]),
        delay_s=rng.choice([0.0, 0.5, 5.0]),
        restarts=rng.randint(0, 12),
        duplicates=rng.random() < 0.5,
    )
    return msgspec.convert(run, RunConfig), weather


@pytest.mark.heavy
def test_no_promise_is_broken_in_a_hundred_thousand_episodes() -> None:
    rng = random.Random(2026)
    episodes = runs = 0
    while episodes < EPISODES:
        run, weather = drawn(rng)
        world = PretendRun(run, weather).run()
        books = Books("r")
        for _, fact in world.facts:
            books.apply(fact)
        ledger = books.ledger()
        assert world.broken == [], (run, weather)
        assert ledger.closes, (ledger.differences, run, weather)
        assert (world.steps, world.still_open) == (run.run.steps, [])
        assert ledger.train.in_flight.episodes == 0
        episodes += ledger.train.requested.episodes + ledger.eval.requested.episodes
        runs += 1
    print(f"{episodes} episodes in {runs} runs")

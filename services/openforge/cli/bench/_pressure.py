"""What a bound that follows the engine's pressure is worth, in virtual time: `openforge bench schedule --pressure`.

The engine is pretended: it has memory for the histories of `CAPACITY` episodes. Where n of them are more than that, one
takes (n / CAPACITY)**2 times as long, once because it waits for its share and once because histories are computed anew.
So the throughput falls as 1 / n: in kind what CONCUR (arXiv 2601.22705) reports of real engines, not in number.
"""

from __future__ import annotations

from typing import Any

import msgspec

from openforge.cli.bench._rules import RULES, Size, config_of
from openforge.cli.bench._world import RUN, Durations, Nature, World, log_normal
from openforge.protos import EngineMeasured, EpisodeRequested
from openforge.runs import RunConfig

CAPACITY = 64
MEASURE_EVERY_S = 5
MEDIAN_S, STEP_S = 20.0, 2.0
FIXED = (16, 32, 64, 128, 256)
LEAST, MOST = 8, 256
SIZE = Size(slots=MOST, groups=8, members=8, steps=60)
MAX_LAG = 4


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """`in_flight_least` 0 is a fixed bound. Over the best fixed one: `throughput_vs_best`."""

    in_flight_least: int
    in_flight: int
    episodes_per_s: float
    throughput_vs_best: float
    allowed_mean: float


class BusyWorld(World):
    """A world whose engine slows down, and says how busy it is."""

    def __init__(self, config: RunConfig, durations: Durations, nature: Nature, capacity: int = CAPACITY) -> None:
        self.running = 0
        self.allowed: list[int] = []
        self._capacity = capacity
        self._is_measuring = False
        super().__init__(config, durations, nature)

    def _begin(self, request: EpisodeRequested) -> None:
        self.running += 1
        super()._begin(request)
        if not self._is_measuring:
            self._is_measuring = True
            self._at(MEASURE_EVERY_S, self._measure)

    def _lasts(self, duration_s: float) -> float:
        return duration_s * max(1.0, self.running / self._capacity) ** 2

    def _end(self, request: EpisodeRequested, began: float) -> None:
        self.running -= 1
        super()._end(request, began)

    def _measure(self) -> None:
        self._is_measuring = self.running > 0
        if not self._is_measuring:
            return
        computed = min(self.running, self._capacity)
        self._tell(
            EngineMeasured(
                run=RUN,
                engine="one",
                at_s=int(self.now),
                running=computed,
                waiting=self.running - computed,
                kv_use=computed / self._capacity,
            )
        )
        self.allowed.append(self.core.slots_allowed())
        self._at(MEASURE_EVERY_S, self._measure)


def pressure(seed: int) -> dict[str, Any]:
    bounds = [(0, most) for most in FIXED] + [(LEAST, MOST)]
    worlds = {bound: _world(*bound, seed) for bound in bounds}
    rates = {bound: world.run().trained_episodes / world.tally.ended_s for bound, world in worlds.items()}
    best = max(rates[(0, most)] for most in FIXED)
    return {
        "rows": [
            Row(
                in_flight_least=least,
                in_flight=most,
                episodes_per_s=round(rate, 3),
                throughput_vs_best=round(rate / best, 3),
                allowed_mean=round(sum(world.allowed) / len(world.allowed), 1),
            )
            for ((least, most), rate), world in zip(rates.items(), worlds.values(), strict=True)
        ],
        "violations": sum(len(world.tally.broken) for world in worlds.values()),
    }


def _world(least: int, most: int, seed: int) -> BusyWorld:
    config = config_of(next(rule for rule in RULES if rule.name == "wait"), SIZE, MAX_LAG, seed)
    pacing = msgspec.structs.replace(config.pacing, in_flight=most, in_flight_least=least)
    return BusyWorld(
        msgspec.structs.replace(config, pacing=pacing),
        log_normal(seed, MEDIAN_S, p99_over_p50=4.0),
        Nature(seed=seed, step_s=STEP_S),
    )

"""How many episodes may be open, by how busy the engines are: additive increase, multiplicative decrease.

Promises: the bound stays between `in_flight_least` and `in_flight` of the run file; it is a fold of `EngineMeasured`
alone, so the same facts give the same bound, after any restart and whoever folds them.

The rule is that of Chiu and Jain, "Analysis of the increase and decrease algorithms for congestion avoidance in
computer networks" (1989), with the slow start of Jacobson, "Congestion avoidance and control" (1988), until the first
congestion. That agents are what is admitted, and memory for keys and values what is congested, is CONCUR's
(arXiv 2601.22705): an engine that takes one request more evicts the history that another agent comes back to.
"""

import msgspec

from openforge.protos import EngineMeasured
from openforge.runs.config import PacingSection

INCREASE = 1 / 16
DECREASE = 0.7
SETTLE_S = 15
"""From one change to the next: what a change does shows only as episodes end and begin."""
FORGET_S = 60
"""An engine that said nothing for so long has nothing to do, or is gone."""

PRESSED_QUEUE, PRESSED_KV = 0.1, 0.9
CALM_QUEUE, CALM_KV = 0.02, 0.7


class Busy(msgspec.Struct, frozen=True):
    """How busy one engine was at Unix time `at_s`: waiting over running requests, and its memory in use."""

    at_s: int
    queue: float
    kv_use: float

    def is_pressed(self) -> bool:
        return self.queue > PRESSED_QUEUE or self.kv_use > PRESSED_KV

    def is_calm(self) -> bool:
        return self.queue <= CALM_QUEUE and self.kv_use <= CALM_KV


class Pressure(msgspec.Struct, frozen=True):
    """The fold. `level` is how much of what lies between the least and the most is allowed."""

    level: float = 0.0
    was_pressed: bool = False
    settled_at_s: int = 0
    engines: dict[str, Busy] = {}

    def after(self, fact: EngineMeasured) -> "Pressure":
        known = self.engines.get(fact.engine)
        if known is not None and fact.at_s <= known.at_s:
            return self
        engines = {name: busy for name, busy in self.engines.items() if busy.at_s > fact.at_s - FORGET_S}
        engines[fact.engine] = Busy(fact.at_s, fact.waiting / max(fact.running, 1.0), fact.kv_use)
        heard = msgspec.structs.replace(self, engines=engines)
        return heard._decided(fact.at_s) if fact.at_s >= self.settled_at_s else heard

    def in_flight(self, pacing: PacingSection) -> int:
        """How many episodes may be open."""
        least = pacing.in_flight_least or pacing.in_flight
        return least + int(self.level * (pacing.in_flight - least))

    def _decided(self, at_s: int) -> "Pressure":
        """One pressed engine is enough for less, all have to be calm for more."""
        settled_at_s = at_s + SETTLE_S
        if any(busy.is_pressed() for busy in self.engines.values()):
            level = self.level * DECREASE
            return msgspec.structs.replace(self, level=level, was_pressed=True, settled_at_s=settled_at_s)
        if not all(busy.is_calm() for busy in self.engines.values()):
            return self
        doubling = 0.0 if self.was_pressed else self.level
        level = min(1.0, self.level + max(INCREASE, doubling))
        return msgspec.structs.replace(self, level=level, settled_at_s=settled_at_s)

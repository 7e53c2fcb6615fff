"""Which engines of a run change their weights at the same time. A fold without any I/O.

Promises: at most one wave of those that served the same version is away at once; who never served holds up nobody,
and is held up by nobody; an engine that died is waited for once at most, since it does not serve what the others
serve next.
"""

from openforge.protos import PolicyPublished, PolicyServed

_Age = tuple[int, int]


class Fleet:
    """What each engine served last. `name` is this engine; `waves` parts change their weights one after another."""

    def __init__(self, name: str, waves: int) -> None:
        self._name = name
        self._waves = waves
        self._last: dict[str, _Age] = {}

    def apply(self, served: PolicyServed) -> None:
        self._last[served.engine] = max(_age(served), self._last.get(served.engine, (-1, 0)))

    def waits_for(self, published: PolicyPublished) -> set[str]:
        """The engines that have to serve `published`, or newer, before this one loads it."""
        own = self._last.get(self._name)
        if own is None or self._waves < 2:
            return set()
        members = sorted(engine for engine, age in self._last.items() if age >= own)
        in_a_wave = -(-len(members) // self._waves)
        before = members.index(self._name) // in_a_wave * in_a_wave
        return {engine for engine in members[:before] if self._last[engine] < _age(published)}


def _age(fact: PolicyPublished | PolicyServed) -> _Age:
    return fact.version, fact.incarnation

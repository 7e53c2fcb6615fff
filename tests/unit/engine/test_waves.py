"""Engines that change their weights one wave after another."""

from openforge.engine.waves import Fleet
from openforge.protos import PolicyPublished, PolicyServed


def _published(version: int) -> PolicyPublished:
    return PolicyPublished(run="r", version=version, incarnation=0, location="/w", digest="d", bytes=1)


def _served(engine: str, version: int) -> PolicyServed:
    return PolicyServed(run="r", version=version, incarnation=0, engine=engine, digest="d", probe_error=0.0)


def _fleet(name: str, waves: int, **serving: int) -> Fleet:
    fleet = Fleet(name, waves)
    for engine, version in serving.items():
        fleet.apply(_served(engine, version))
    return fleet


def test_each_wave_waits_for_those_before_it() -> None:
    all_at_4 = dict.fromkeys("abcde", 4)
    waits = {name: _fleet(name, 3, **all_at_4).waits_for(_published(5)) for name in "abcde"}
    assert waits == {"a": set(), "b": set(), "c": {"a", "b"}, "d": {"a", "b"}, "e": {"a", "b", "c", "d"}}


def test_the_wait_ends_as_the_wave_before_serves_it_or_newer() -> None:
    fleet = _fleet("c", 3, a=4, b=4, c=4)
    assert fleet.waits_for(_published(5)) == {"a", "b"}
    fleet.apply(_served("a", 6))
    fleet.apply(_served("b", 5))
    assert fleet.waits_for(_published(5)) == set()


def test_who_never_served_waits_for_nobody() -> None:
    assert _fleet("z", 2, a=4, b=4).waits_for(_published(5)) == set()


def test_an_engine_that_fell_behind_is_not_waited_for() -> None:
    assert _fleet("b", 2, a=3, b=4, c=4).waits_for(_published(5)) == set()
    assert _fleet("c", 2, a=3, b=4, c=4).waits_for(_published(5)) == {"b"}


def test_one_wave_is_all_at_once() -> None:
    assert _fleet("b", 1, a=4, b=4).waits_for(_published(5)) == set()

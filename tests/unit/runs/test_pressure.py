"""The bound on open episodes: what engines say of themselves moves it, within what the run file allows."""

import random

import pytest

from openforge.protos import EngineMeasured
from openforge.runs.config import PacingSection
from openforge.runs.pressure import DECREASE, FORGET_S, INCREASE, SETTLE_S, Pressure

PACING = PacingSection(in_flight=160, in_flight_least=16)


def measured(at_s: int, *, engine: str = "one", waiting: float = 0.0, kv_use: float = 0.5) -> EngineMeasured:
    return EngineMeasured(run="r", engine=engine, at_s=at_s, running=40.0, waiting=waiting, kv_use=kv_use)


def after(*facts: EngineMeasured) -> Pressure:
    pressure = Pressure()
    for fact in facts:
        pressure = pressure.after(fact)
    return pressure


def calm_until(at_s: int) -> Pressure:
    return after(*(measured(at) for at in range(0, at_s, SETTLE_S)))


def test_it_begins_with_the_least_and_doubles_until_the_first_pressure() -> None:
    levels = [Pressure().level, *(calm_until(rounds * SETTLE_S).level for rounds in range(1, 7))]
    assert levels == [0.0, INCREASE, 2 * INCREASE, 4 * INCREASE, 8 * INCREASE, 1.0, 1.0]
    assert Pressure().in_flight(PACING) == 16
    assert calm_until(3 * SETTLE_S).in_flight(PACING) == 16 + 144 // 4
    assert calm_until(9 * SETTLE_S).in_flight(PACING) == 160


@pytest.mark.parametrize("pressed", [{"waiting": 5.0}, {"kv_use": 0.95}])
def test_a_queue_or_full_memory_takes_a_share_away_and_calm_gives_it_back_in_equal_steps(
    pressed: dict[str, float],
) -> None:
    pressure = calm_until(9 * SETTLE_S).after(measured(1000, **pressed))
    assert pressure.level == DECREASE
    for rounds in range(1, 4):
        pressure = pressure.after(measured(1000 + rounds * SETTLE_S))
        assert pressure.level == pytest.approx(DECREASE + rounds * INCREASE)


def test_between_pressed_and_calm_nothing_moves() -> None:
    before = calm_until(3 * SETTLE_S)
    for busy in (measured(1000, kv_use=0.8), measured(1000, waiting=2.0)):
        assert before.after(busy).level == before.level


def test_a_change_is_given_time_to_show() -> None:
    pressure = calm_until(9 * SETTLE_S)
    for at_s in range(1000, 1000 + SETTLE_S):
        pressure = pressure.after(measured(at_s, waiting=20.0))
    assert pressure.level == DECREASE
    assert pressure.after(measured(1000 + SETTLE_S, waiting=20.0)).level == pytest.approx(DECREASE**2)


def test_one_pressed_engine_counts_until_it_was_not_heard_of_for_long() -> None:
    pressed = calm_until(9 * SETTLE_S).after(measured(1000, engine="two", waiting=20.0))
    still = pressed.after(measured(1000 + SETTLE_S))
    assert still.level == pytest.approx(DECREASE**2)
    gone = still.after(measured(1000 + FORGET_S))
    assert gone.level == pytest.approx(DECREASE**2 + INCREASE)
    assert set(gone.engines) == {"one"}


def test_what_is_told_twice_or_late_changes_nothing() -> None:
    pressure = after(measured(0), measured(100, waiting=20.0))
    assert pressure.after(measured(100, waiting=20.0)) == pressure
    assert pressure.after(measured(40)) == pressure


def test_it_never_leaves_its_bounds_whatever_engines_say() -> None:
    rng = random.Random(5)
    pressure = Pressure()
    for at_s in range(0, 20_000, 5):
        pressure = pressure.after(measured(at_s, waiting=rng.choice([0.0, 0.0, 0.0, 3.0, 900.0]), kv_use=rng.random()))
        assert 16 <= pressure.in_flight(PACING) <= 160


def test_without_a_least_the_bound_stands_still() -> None:
    fixed = PacingSection(in_flight=64)
    assert {pressure.in_flight(fixed) for pressure in (Pressure(), calm_until(60), calm_until(900))} == {64}

"""The comparison of rules in virtual time: its world notices what is broken, and what it says of the rules holds."""

import msgspec
import pytest

from openforge.cli.bench._pressure import pressure
from openforge.cli.bench._rules import RULES, Areal, Size, config_of, tallied
from openforge.cli.bench._world import Nature, World, log_normal
from openforge.cli.bench.schedule import Recorded, Row, calibrated, limit, main, row_of, stress
from openforge.protos import BatchTrained, EpisodeRequested, GroupClosed, GroupOpened, PolicyServed, TrajectoryVerified
from openforge.runs.names import train_group

SIZE = Size(slots=128, steps=24)
LONG = Size(slots=128, steps=40)
BY_NAME = {rule.name: rule for rule in RULES}


def row(name: str, max_lag: int, size: Size = SIZE) -> Row:
    rule = BY_NAME[name]
    tally = tallied(rule, rule.sized(size), max_lag, log_normal(3), Nature(seed=3, step_s=rule.scale))
    assert tally.broken == []
    return row_of(rule, size, max_lag, tally)


def test_no_promise_is_broken_in_random_worlds_with_restarts() -> None:
    result = stress(4000, seed=11)
    assert (result["violations"], result["broken"]) == (0, [])
    assert result["restarts"] > 0


@pytest.mark.heavy
def test_no_promise_is_broken_in_a_hundred_thousand_episodes_with_restarts() -> None:
    result = stress(100_000, seed=7)
    assert (result["violations"], result["broken"]) == (0, [])


def test_the_world_notices_a_rule_that_breaks_the_bound() -> None:
    config = config_of(BY_NAME["areal"], SIZE, 1, seed=3)
    tally = World(config, log_normal(3), Nature(seed=3), batcher=Areal, bound=1).run()
    assert any("a batch that lags" in said for said in tally.broken)


def test_without_lag_the_cores_are_exactly_synchronous() -> None:
    for name in ("drop", "wait", "mask"):
        config = config_of(BY_NAME[name], Size(slots=64, groups=4, members=4, steps=12), 0, seed=3)
        world = World(config, log_normal(3), Nature(seed=3), keep_facts=True)
        assert world.run().broken == []
        served = {fact.version: at for at, fact in world.facts("policy") if isinstance(fact, PolicyServed)}
        for at, fact in world.facts("group"):
            if isinstance(fact, GroupOpened):
                assert fact.start_version == fact.ordinal // 4
                assert at >= served[fact.start_version]
        closed = {fact.group: at for at, fact in world.facts("group") if isinstance(fact, GroupClosed)}
        for at, fact in world.facts("policy"):
            if isinstance(fact, BatchTrained):
                assert set(fact.groups) == {train_group(4 * fact.base + place) for place in range(4)}
                assert at >= max(closed[group] for group in fact.groups)
                assert fact.lag == 0


def test_dropping_trains_the_short_masking_the_late_tokens_and_waiting_everything() -> None:
    drop, wait, mask = row("drop", 2), row("wait", 2), row("mask", 2)
    assert drop.length_bias < 0.95
    assert drop.discarded_share > 0.1
    assert mask.masked_share > 0.05
    assert mask.length_bias < 0.95
    assert (wait.length_bias, wait.discarded_share, wait.masked_share) == (1.0, 0.0, 0.0)


def test_at_the_lag_that_was_seen_and_without_bias_wait_is_faster_than_capacity_alone() -> None:
    areal = row("areal", 1)
    wait = row("wait", areal.lag_max)
    assert (wait.length_bias, areal.length_bias) == (1.0, 1.0)
    assert areal.lag_max > 1
    assert wait.lag_max <= areal.lag_max
    assert wait.throughput_vs_bound > 1.2 * areal.throughput_vs_bound


def test_wait_keeps_the_bound_that_verls_check_misses_and_is_as_fast() -> None:
    theirs, ours = row("verl wait", 4), row("wait", 4)
    assert theirs.lag_max == 5
    assert ours.lag_max == 4
    assert ours.throughput_vs_bound == pytest.approx(theirs.throughput_vs_bound, rel=0.05)


def test_where_batches_grow_wait_is_the_fastest_rule_without_bias() -> None:
    grown = row("wait, batch up to 4x", 4, LONG)
    assert (grown.length_bias, grown.discarded_share, grown.masked_share, grown.lag_max) == (1.0, 0.0, 0.0, 4)
    for name in ("wait", "areal", "verl wait"):
        assert grown.throughput_vs_bound > row(name, 4, LONG).throughput_vs_bound
    assert grown.updates_vs_bound < row("wait", 4, LONG).updates_vs_bound  # the price: fewer, larger batches


def test_no_rule_of_whole_groups_passes_the_limit() -> None:
    for max_lag in (0, 2):
        most = limit(log_normal(3), SIZE, max_lag).whole_group_limit
        assert row("wait", max_lag).throughput_vs_bound <= most < 1


def test_a_bound_that_follows_the_engine_comes_near_the_best_fixed_one_that_nobody_knows_before() -> None:
    found = pressure(seed=1)
    assert found["violations"] == 0
    adaptive = next(row for row in found["rows"] if row.in_flight_least)
    fixed = {row.in_flight: row.throughput_vs_best for row in found["rows"] if not row.in_flight_least}
    assert fixed[64] == 1.0
    assert max(fixed[32], fixed[128]) < 0.6
    assert adaptive.throughput_vs_best > 0.8


def test_a_run_is_predicted_from_its_own_durations() -> None:
    config = config_of(BY_NAME["drop"], Size(slots=64, groups=4, members=4, steps=20), 1, seed=5)
    world = World(config, log_normal(5, median_s=2.0, p99_over_p50=3.0), Nature(seed=5, step_s=1.5), keep_facts=True)
    ended_s = world.run().ended_s
    requested = {fact.episode: at for at, fact in world.facts("episode") if isinstance(fact, EpisodeRequested)}
    verified = {fact.episode: at for at, fact in world.facts("trajectory") if isinstance(fact, TrajectoryVerified)}
    groups_s: dict[str, list[float]] = {}
    for episode, at in sorted(verified.items()):
        groups_s.setdefault(episode.rpartition("-")[0], []).append(at - requested[episode])
    run = Recorded(
        config=config,
        groups_s=groups_s,
        steps_s=[1.5],
        serves_s=[0.05],
        took_s=ended_s,
    )
    assert calibrated(run)["predicted_over_real"] == pytest.approx(1.0, abs=0.02)


def test_the_command_prints_one_object_with_rows_and_violations(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json", "--slots", "32", "--max-lag", "1", "--steps", "3"]) == 0
    printed = msgspec.json.decode(capsys.readouterr().out)
    assert printed["violations"] == 0
    assert {one["rule"] for one in printed["rows"]} == set(BY_NAME)
    assert set(Row.__struct_fields__) == set(printed["rows"][0])

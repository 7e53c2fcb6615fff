"""Runs at several lags beside synchronous ones: what is paired, what an interval covers, what nobody can pass."""

import json
from math import sqrt
from pathlib import Path

import pytest
from learner_world import run_config, tiny_model
from typer.testing import CliRunner

from openforge.cli.lags.__main__ import app
from openforge.cli.lags.compare import bound, compared, interval, overlap
from openforge.cli.lags.exact import learned
from openforge.cli.lags.measured import Measured
from openforge.cli.lags.page import draw, table


def run(seed: int, max_lag: int, reward: float, took_s: float = 100.0) -> Measured:
    return Measured(
        seed=seed,
        max_lag=max_lag,
        in_flight=8,
        rewards=[reward / 2, reward],
        lag_mean=max_lag / 2,
        lag_max=max_lag,
        episodes=90,
        retired=10,
        took_s=took_s,
        generation_s=20.0,
        step_s=15.0,
        serve_s=5.0,
        wall_s=200.0,
        cpu_s=120.0,
        load=(1.0, 2.0),
        metrics={"ess": 0.9, "kl_mean": 0.01, "ratio_capped": 0.02},
    )


def test_what_a_seed_brings_with_it_cancels() -> None:
    runs = [run(seed, lag, base - 0.1 * lag) for seed, base in ((1, 0.4), (2, 0.9)) for lag in (0, 1)]
    sync, asynchronous = compared(runs, cores=2)
    assert (sync.whole_more.mean, sync.end_more.mean, sync.speed.mean, sync.bound) == (0.0, 0.0, 1.0, 1.0)
    assert asynchronous.end.mean == pytest.approx(0.55)
    assert asynchronous.end_more.mean == pytest.approx(-0.1)
    assert asynchronous.end_more.high == pytest.approx(-0.1), "both seeds lost as much, though they differ by 0.5"
    assert asynchronous.retired_share == pytest.approx(0.1)


def test_a_difference_that_seeds_do_not_agree_on_is_no_difference() -> None:
    runs = [run(seed, lag, 0.5 + lag * by) for seed, by in ((1, -0.2), (2, 0.1)) for lag in (0, 1)]
    more = compared(runs, cores=2)[1].end_more
    assert more.low < 0 < more.high


def test_a_seed_that_is_not_complete_is_not_compared() -> None:
    rows = compared([run(1, 0, 0.5), run(1, 1, 0.5), run(2, 0, 0.9)], cores=2)
    assert [row.seeds for row in rows] == [1, 1]


def test_speed_is_the_ratio_of_times_and_its_mean_is_geometric() -> None:
    runs = [run(1, 0, 0.5), run(1, 1, 0.5, took_s=50.0), run(2, 0, 0.5), run(2, 1, 0.5, took_s=200.0)]
    assert compared(runs, cores=2)[1].speed.mean == pytest.approx(1.0)


def test_the_bound_is_what_training_or_the_cores_allow() -> None:
    assert bound(run(1, 0, 0.5), cores=2) == pytest.approx(100 / 40), "two steps of 20 s after one another"
    assert bound(run(1, 0, 0.5), cores=1) == pytest.approx(100 / 60), "60 s of CPU time on one core"


def test_overlap_alone_saves_the_shorter_of_generation_and_training() -> None:
    assert overlap(run(1, 0, 0.5)) == pytest.approx(100 / 60), "40 s of training beside 60 s of generation"
    assert overlap(run(1, 0, 0.5, took_s=50.0)) == pytest.approx(50 / 40)


def test_the_interval_is_students() -> None:
    found = interval([1.0, 2.0, 3.0])
    assert (found.mean, found.high - found.mean) == (2.0, pytest.approx(4.303 / sqrt(3)))
    assert found.mean - found.low == found.high - found.mean


def test_what_is_exactly_so_old_is_learned_from_and_the_same_every_time(tmp_path: Path) -> None:
    small = {"groups_per_step": 2, "group_size": 4, "max_lag": 1}
    config = run_config(
        tiny_model(tmp_path),
        run={"steps": 3},
        pacing=small,
        learner={"learning_rate": 2e-2},
        sampling={"max_tokens": 6},
    )
    sync, stale, again = learned(config, 0), learned(config, 2), learned(config, 2)
    assert stale == again
    assert sync.rewards[0] == stale.rewards[0], "the first step is on policy whatever the lag"
    assert sync.metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert sync.metrics["gap_mean"] < 1e-5, "prompts of several lengths are answered at once as each by itself"
    assert stale.metrics["gap_mean"] > 10 * sync.metrics["gap_mean"]


def test_table_and_curves_show_each_lag(tmp_path: Path) -> None:
    runs = [run(seed, lag, 0.5) for seed in (1, 2) for lag in (0, 4)]
    lines = table(compared(runs, cores=2))
    assert len({line.count("|") for line in lines}) == 1
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["0", "4"]
    draw(runs, tmp_path / "curves.svg")
    assert "max_lag 4" in (tmp_path / "curves.svg").read_text()


def test_what_was_computed_is_not_computed_again_unless_a_setting_changed(tmp_path: Path) -> None:
    """A curve that nobody could have learned is put into the result of two seeds, and stays as long as it may."""
    arguments = ["exact", "examples/tiny.toml", "--lags", "0", "--seeds", "2", "--out", str(tmp_path)]
    model = ["--set", f"model.path={tiny_model(tmp_path)}", "--set", "sampling.max_tokens=2", "--set", "run.steps=1"]
    small = [*model, "--set", "pacing.groups_per_step=1", "--set", "pacing.group_size=2"]
    result = tmp_path / "exact.json"

    def rewards(*more: str) -> list[list[float]]:
        done = CliRunner().invoke(app, [*arguments, *small, *more])
        assert done.exit_code == 0, done.output
        return [curve["rewards"] for curve in json.loads(result.read_bytes())["curves"]]

    _, second = rewards()
    said = json.loads(result.read_bytes())
    said["curves"][0]["rewards"] = [-7.0]
    result.write_text(json.dumps(said))
    assert rewards() == [[-7.0], second]
    assert rewards("--seeds", "1") == [[-7.0], second], "what was not asked for stays"
    assert rewards("--set", "sampling.temperature=0.9")[0] != [-7.0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--lags", "0,x"), "no list of whole numbers"),
        (("--lags", "1,2"), "lacks 0"),
        (("--lags", "0,-1"), "none below 0"),
        (("--lags", "0,0"), "write each once"),
        (("--set", "run.steps=0"), "run.steps of 1 or more"),
        (("examples/demo.toml",), "environment.name = 'letters'"),
    ],
)
def test_what_cannot_be_computed_is_refused(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    done = CliRunner().invoke(app, ["exact", *arguments, "--out", str(tmp_path)], env={"COLUMNS": "400"})
    assert done.exit_code == 2
    assert said in " ".join(done.output.replace("│", " ").split())
    assert list(tmp_path.iterdir()) == []

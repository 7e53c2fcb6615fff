"""The cost of traces is told as a share of what a call costs without them."""

import urllib.request

import pytest

from openforge.cli.bench.tracing import Spent, costs, forgetful_collector


def test_costs_are_medians_of_shares_of_the_round_without_traces() -> None:
    found = costs(
        [
            {"off": Spent(2.0, 100.0), "sampled": Spent(2.02, 99.0), "all": Spent(2.2, 90.0)},
            {"off": Spent(4.0, 50.0), "sampled": Spent(4.08, 49.0), "all": Spent(4.4, 40.0)},
            {"off": Spent(1.0, 10.0), "sampled": Spent(9.0, 1.0), "all": Spent(1.1, 9.0)},
        ]
    )
    assert (found["sampled"]["cpu"], found["sampled"]["calls"]) == (pytest.approx(0.02), pytest.approx(0.02))
    assert (found["all"]["cpu"], found["all"]["calls"]) == (pytest.approx(0.1), pytest.approx(0.1))
    assert (found["sampled"]["cpu_from"], found["sampled"]["cpu_to"]) == (pytest.approx(0.01), pytest.approx(8.0))
    assert found["off"] == {"cpu_ms": 2.0, "calls_per_s": 50.0}


def test_the_interval_of_many_rounds_leaves_out_both_ends() -> None:
    rounds = [{"off": Spent(1.0, 1.0), "sampled": Spent(1 + n / 100, 1.0), "all": Spent(1.0, 1.0)} for n in range(25)]
    found = costs(rounds)["sampled"]
    assert (found["cpu_from"], found["cpu"], found["cpu_to"]) == (0.07, 0.12, 0.17)


def test_the_collector_takes_what_it_is_sent() -> None:
    with forgetful_collector() as url, urllib.request.urlopen(f"{url}/v1/traces", data=b"spans") as answer:
        assert answer.status == 200

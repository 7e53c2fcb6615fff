"""The cost of traces is told as a share of what a call costs without them."""

import urllib.request

import pytest

from openforge.cli.bench.tracing import costs, forgetful_collector


def test_costs_are_medians_of_shares_of_the_round_without_traces() -> None:
    found = costs(
        [
            {"off": 2.0, "sampled": 2.02, "all": 2.2},
            {"off": 4.0, "sampled": 4.08, "all": 4.4},
            {"off": 1.0, "sampled": 9.0, "all": 1.1},
        ]
    )
    assert found["sampled"]["cpu"] == pytest.approx(0.02)
    assert found["all"]["cpu"] == pytest.approx(0.1)
    assert (found["sampled"]["cpu_from"], found["sampled"]["cpu_to"]) == (pytest.approx(0.01), pytest.approx(8.0))
    assert found["off"] == {"cpu_ms": 2.0}


def test_the_interval_of_many_rounds_leaves_out_both_ends() -> None:
    found = costs([{"off": 1.0, "sampled": 1 + n / 100, "all": 1.0} for n in range(25)])["sampled"]
    assert (found["cpu_from"], found["cpu"], found["cpu_to"]) == (0.07, 0.12, 0.17)


def test_the_collector_takes_what_it_is_sent() -> None:
    with forgetful_collector() as url, urllib.request.urlopen(f"{url}/v1/traces", data=b"spans") as answer:
        assert answer.status == 200

"""The cost of traces is told as a share of what a call costs without them."""

import urllib.request

import pytest

from openforge.cli.bench.tracing import costs, forgetful_collector


def test_costs_are_medians_of_shares_of_the_round_without_traces() -> None:
    def spent(cpu: float, calls: float) -> dict[str, float]:
        return {"cpu": cpu, "calls": calls}

    rounds = [
        {"off": spent(2.0, 100.0), "sampled": spent(2.02, 99.0), "all": spent(2.2, 90.0)},
        {"off": spent(4.0, 50.0), "sampled": spent(4.08, 49.0), "all": spent(4.4, 40.0)},
        {"off": spent(1.0, 10.0), "sampled": spent(9.0, 1.0), "all": spent(1.1, 9.0)},
    ]
    found = costs(rounds)
    assert found["sampled"] == {"cpu": pytest.approx(0.02), "calls": pytest.approx(0.02)}
    assert found["all"] == {"cpu": pytest.approx(0.1), "calls": pytest.approx(0.1)}


def test_the_collector_takes_what_it_is_sent() -> None:
    with forgetful_collector() as url, urllib.request.urlopen(f"{url}/v1/traces", data=b"spans") as answer:
        assert answer.status == 200

"""The batches of `bench learner`, and that the ways it compares compute the same step."""

import statistics
from pathlib import Path

import pytest
from learner_world import VOCABULARY, tiny_model

from openforge.cli.bench import _learner_batches as batches
from openforge.cli.bench.learner import ratios, told
from openforge.learner.bench import in_rows, padded, settings


def test_the_long_tailed_batch_is_as_it_is_described_and_fills_rows() -> None:
    batch = batches.long_tailed(1000)
    lengths = sorted(len(one.ids_T) for one in batch)
    assert (len(lengths), lengths[-1]) == (256, 2048)
    assert statistics.median(lengths) == pytest.approx(300, rel=0.1)
    assert lengths[230] / statistics.median(lengths) == pytest.approx(3.56, rel=0.25)  # at the 90th percentile
    assert batches.packing_efficiency(batch) >= 0.97
    assert sum(one.weight * len(one.at_K) for one in batch) == pytest.approx(1.0)


def test_the_group_shares_one_prompt_and_fits_into_a_row() -> None:
    batch = batches.one_group(1000)
    prompts = {tuple(one.ids_T[: one.at_K[0]]) for one in batch}
    assert (len(batch), len(prompts)) == (8, 1)
    assert batches.packing_efficiency(batch) > 0.9


def test_rows_and_padded_batches_are_the_same_step(tmp_path: Path) -> None:
    config = settings(str(tiny_model(tmp_path)), threads=1, ranks=1)
    batch = batches.long_tailed(VOCABULARY, 8)
    rows, plain = in_rows(config, batch), padded(config, batch)
    assert rows.loss == pytest.approx(plain.loss, rel=1e-5)
    assert rows.grad_norm == pytest.approx(plain.grad_norm, rel=1e-4)
    assert rows.forwarded_tokens < plain.forwarded_tokens


def test_a_peer_that_was_not_measured_is_told_with_its_reason() -> None:
    way = {"step_s": 1.0, "cpu_s": 0.5, "forwarded_tokens": 7, "loss": 0.5, "grad_norm": 2.0}
    batch = {"sequences": 8, "tokens": 7, "rows": way, "padded": way, "trl": {"reason": "it cannot be installed: no"}}
    found = {"model": "m", "threads": 1, "cores": 2, "packing_efficiency": 0.99, "batches": {"one_group": batch}}
    assert "trl               not measured: it cannot be installed: no" in told(found)


def test_rates_are_compared_by_the_clock_and_by_cpu_time_where_the_peer_was_measured() -> None:
    batch = {"rows": {"step_s": 2.0, "cpu_s": 1.0}, "padded": {"step_s": 6.0, "cpu_s": 4.0}, "trl": {"reason": "no"}}
    assert ratios(batch, "_one_group") == {
        "tokens_per_s_ratio_trl_one_group": None,
        "tokens_per_cpu_s_ratio_trl_one_group": None,
        "tokens_per_s_ratio_padded_one_group": 3.0,
        "tokens_per_cpu_s_ratio_padded_one_group": 4.0,
    }

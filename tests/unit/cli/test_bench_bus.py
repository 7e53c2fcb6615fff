"""`openforge bench bus` says what its readers expect, and the wire is small."""

import json
import subprocess
import sys

from openforge.cli.bench.bus import TOKENS, of_size, trajectory, wire


def test_a_long_trajectory_is_small_and_quick_on_the_wire() -> None:
    figures = wire()
    assert figures["bytes_per_token_raw"] <= 8.2
    assert figures["bytes_per_token_zstd"] < figures["bytes_per_token_raw"]
    assert figures["encode_ms_p50"] < 0.1
    assert figures["decode_ms_p50"] < 0.1


def test_every_token_of_the_measured_trajectory_has_its_logprob() -> None:
    [sequence] = trajectory(TOKENS).sequences
    assert len(sequence.ids) == len(sequence.logprobs) == 4 * TOKENS


def test_facts_of_a_size_have_that_size_on_the_wire() -> None:
    for kilobytes in (1, 64, 266):
        assert abs(len(of_size(kilobytes, 1)[0].encode()) - 1000 * kilobytes) < 100


def test_it_prints_one_json_object_and_nothing_else() -> None:
    command = [sys.executable, "-m", "openforge.cli.bench.bus", "--json", "--repeats", "1", "--share", "0.01"]
    path = ":".join(entry for entry in sys.path if entry)
    ended = subprocess.run(command, env={"PYTHONPATH": path}, capture_output=True, text=True, timeout=120, check=True)
    report = json.loads(ended.stdout)
    for sync in ("default", "always"):
        assert set(report["publish_ratio"][sync]) == {"1", "64", "266"}
        assert all(rates["bare_per_s"] > 0 for rates in report["publish_rates"][sync].values())
    assert report["machine"]["cpus"] > 0

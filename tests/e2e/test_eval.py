"""`openforge eval` as a user starts it: real services, a real model, two kinds of harness."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyarrow import parquet

TINY = Path(__file__).parents[2] / "examples" / "tiny.toml"
ASKED = (
    "evaluation.heldout_episodes=3",
    "evaluation.trials=2",
    'evaluation.harnesses=["letters", "letters-script"]',
    "run.name=both",
    "environment.limits.timeout_s=300",  # what is out of time is told, and would differ from one evaluation to the next
)


def evaluate(runs: Path) -> dict[str, Any]:
    argv = [sys.executable, "-m", "openforge.cli", "eval", str(TINY), "--plain"]
    argv += [part for field in ASKED for part in ("--set", field)]
    environment = {**os.environ, "OPENFORGE_RUNS": str(runs), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    said: dict[str, Any] = msgspec.json.decode((runs / "both-eval" / "eval.json").read_bytes())
    return said


@pytest.mark.heavy
def test_two_harnesses_are_tried_at_the_same_tasks_and_the_same_seed_says_the_same_again(tmp_path: Path) -> None:
    first = evaluate(tmp_path)
    rows = parquet.read_table(tmp_path / "both-eval" / "trials.parquet").to_pylist()
    assert [(result["harness"], result["tasks"], result["trials"]) for result in first["harnesses"]] == [
        ("letters", 3, 6),
        ("letters-script", 3, 6),
    ]
    by_harness = [{row["instance"] for row in rows if row["harness"] == h} for h in ("letters", "letters-script")]
    assert by_harness[0] == by_harness[1]
    assert "env_characters" in dict(rows[0]["metrics"])
    assert (tmp_path / "both-eval" / "eval.html").read_text().startswith("<!doctype html>")
    assert evaluate(tmp_path) == first
    again = evaluate(tmp_path / "elsewhere")  # nothing of the first one is read
    assert again["harnesses"] == first["harnesses"]
    assert again["differences"] == first["differences"]

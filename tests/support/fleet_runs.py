"""`fleet_steps.py` in a process of its own, and whether two of its results are the same."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from learner_world import ROOT

SCRIPT = ROOT / "tests/support/fleet_steps.py"
OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def steps(
    model: Path, world: int, out: Path, load: Path | None = None, sections: dict[str, Any] | None = None
) -> dict[str, Any]:
    paths = [str(ROOT / part) for part in ("protos", "libs", "services", "envs", "tests/support")]
    inherited = {name: value for name, value in os.environ.items() if name not in OF_TORCHRUN}
    subprocess.run(
        [
            *(sys.executable, str(SCRIPT), str(model), str(world), str(out), json.dumps(sections or {})),
            *([str(load)] if load else []),
        ],
        env={**inherited, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        timeout=900,
        check=True,
    )
    return dict(json.loads((out / "seen.json").read_text()))


def close(left: Any, right: Any, tolerance: float) -> bool:
    return flat(left) == pytest.approx(flat(right), rel=tolerance, abs=tolerance)


def flat(value: Any) -> list[float]:
    """All numbers of nested lists and dictionaries, in order."""
    match value:
        case dict():
            return flat(list(value.values()))
        case list():
            return [number for inner in value for number in flat(inner)]
        case _:
            return [float(value)]

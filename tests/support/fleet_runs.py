"""`fleet_steps.py` in a process of its own, and whether two of its results are the same."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_world import ROOT, inherited
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

SCRIPT = ROOT / "tests/support/fleet_steps.py"


def steps(
    model: Path, world: int, out: Path, load: Path | None = None, sections: dict[str, Any] | None = None
) -> dict[str, Any]:
    paths = [str(ROOT / part) for part in ("protos", "libs", "services", "envs", "tests/support")]
    subprocess.run(
        [
            *(sys.executable, str(SCRIPT), str(model), str(world), str(out), json.dumps(sections or {})),
            *([str(load)] if load else []),
        ],
        env={**inherited(), "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
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


def furthest(left: Path, right: Path) -> float:
    """The largest difference between two weights of the same name; the names are the same."""
    ours, theirs = (load_file(folder / "weights.safetensors") for folder in (left, right))
    assert ours.keys() == theirs.keys()
    return max((ours[name] - theirs[name]).abs().max().item() for name in ours)


def state(folder: Path) -> dict[str, Any]:
    """Everything that a checkpoint holds, by its path in it, whole: weights, optimizer, random numbers."""
    dcp_to_torch_save(folder, folder.parent / "whole.pt")
    return dict(leaves("", torch.load(folder.parent / "whole.pt", weights_only=False)))


def leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield path, value
    else:
        for name, inner in items:
            yield from leaves(f"{path}/{name}", inner)


def same_state(left: Path, right: Path) -> bool:
    """Bit for bit."""
    one, other = state(left), state(right)
    assert any("exp_avg_sq" in name for name in one), "the optimizer's moments are in it"
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        for name, value in one.items()
    )

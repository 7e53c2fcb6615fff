"""Does an engine compute what the writer of the weights computed?

The probe catches wrong, partial and stale loads. A small training step may move it by less than the tolerance: the
manifest's digest covers the rest.
"""

import math
from collections.abc import Sequence
from pathlib import Path

from openforge.weights import BadWeights, Probe

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}  # bfloat16 rounds in each layer, by up to 0.34 as measured


def coarser(*dtypes: str) -> str:
    """Of the weights' dtype and the engine's, the one that decides how near the numbers can be."""
    return "bfloat16" if "bfloat16" in dtypes else "float32"


def judge_probe(found: Sequence[float], probe: Probe, folder: Path, dtype: str) -> float:
    """The largest difference to what the manifest states; raises `BadWeights` beyond the tolerance."""
    differences = [abs(a - b) for a, b in zip(found, probe.logprobs, strict=True)]
    error = max(differences, key=lambda difference: math.inf if math.isnan(difference) else difference)
    if not error <= TOLERANCE[dtype]:  # also where one is not a number
        raise BadWeights(
            f"weights {folder}: the log-prob probe differs by {error:.4g} from the manifest, more than "
            f"{TOLERANCE[dtype]:g} in {dtype}: wrong or partly loaded weights, not served."
        )
    return error

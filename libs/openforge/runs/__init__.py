"""Run files and what is known of runs."""

from openforge.runs.config import RunConfig
from openforge.runs.load import BadRunFile, canonical, config_of, differing, load_run_file
from openforge.runs.state import RunState, run_state

__all__ = [
    "BadRunFile",
    "RunConfig",
    "RunState",
    "canonical",
    "config_of",
    "differing",
    "load_run_file",
    "run_state",
]

"""Run files and what is known of runs."""

from openforge.runs.config import RunConfig
from openforge.runs.load import BadRunFile, canonical, config_of, differing, load_run_file
from openforge.runs.state import RunState, run_state
from openforge.runs.submit import (
    RunDiffers,
    UnknownRun,
    pause_run,
    state_of,
    stop_run,
    submit,
    submitted_config,
)

__all__ = [
    "BadRunFile",
    "RunConfig",
    "RunDiffers",
    "RunState",
    "UnknownRun",
    "canonical",
    "config_of",
    "differing",
    "load_run_file",
    "pause_run",
    "run_state",
    "state_of",
    "stop_run",
    "submit",
    "submitted_config",
]

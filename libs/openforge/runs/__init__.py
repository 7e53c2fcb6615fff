"""Run files and what is known of runs."""

from openforge.runs.config import RunConfig
from openforge.runs.ledger import Account, Books, Ledger, Tally, ledger_of
from openforge.runs.load import BadRunFile, canonical, config_of, differing, load_run_file
from openforge.runs.progress import Evaluation, Progress, Step
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
from openforge.runs.summary import Summary, bootstrap, summary

__all__ = [
    "Account",
    "BadRunFile",
    "Books",
    "Evaluation",
    "Ledger",
    "Progress",
    "RunConfig",
    "RunDiffers",
    "RunState",
    "Step",
    "Summary",
    "Tally",
    "UnknownRun",
    "bootstrap",
    "canonical",
    "config_of",
    "differing",
    "ledger_of",
    "load_run_file",
    "pause_run",
    "run_state",
    "state_of",
    "stop_run",
    "submit",
    "submitted_config",
    "summary",
]

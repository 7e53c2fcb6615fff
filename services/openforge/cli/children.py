"""Commands that a tool runs to their end.

Promises: they end with the tool, however it ends, as by Ctrl-C: with all that they started.
"""

import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from openforge.service import ends_with_us


def run(command: Sequence[str], *, stdout: int | None = None) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command, stdout=stdout, check=False, preexec_fn=with_us())


def train(run_file: Path, overrides: Sequence[str]) -> None:
    """`openforge train`, what it prints on standard error. Where it fails, and so has said why, we exit as it did."""
    sets = [argument for override in overrides for argument in ("--set", override)]
    ended = run((sys.executable, "-m", "openforge.cli", "train", str(run_file), *sets), stdout=2)
    if ended.returncode:
        sys.exit(ended.returncode)


def with_us() -> Callable[[], None]:
    """A `preexec_fn` of a child that our end interrupts."""
    ends = ends_with_us(signal.SIGINT)

    def before_exec() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # who starts us in the background may have it ignored
        ends()

    return before_exec

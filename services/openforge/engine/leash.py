"""`python -m openforge.engine.leash COMMAND ...`: runs the command, and ends all of its processes when its parent ends.

A vLLM server must not outlive the service that drives it: it would hold port and memory against the next one. It is
several processes, and those that compute do not see that the first of them was killed.
"""

import os
import signal
import subprocess
import sys
from types import FrameType

from openforge.service import die_with_parent


def main() -> None:
    if os.getpgrp() != os.getpid():
        os.setpgrp()
    signal.signal(signal.SIGUSR1, _end_all)
    signal.signal(signal.SIGTERM, _leave_it_to_the_command)
    die_with_parent(signal.SIGUSR1)
    code = subprocess.Popen(sys.argv[1:]).wait()
    sys.exit(code if code >= 0 else 128 - code)


def _end_all(number: int, frame: FrameType | None) -> None:
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _leave_it_to_the_command(number: int, frame: FrameType | None) -> None:
    """Who asks the group to end asks the command too. Not ignored, for the command would inherit that."""


if __name__ == "__main__":
    main()

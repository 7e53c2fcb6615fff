"""`python -m openforge.engine.leash COMMAND ...`: becomes the command, and is killed when its parent ends.

A vLLM server must not outlive the service that drives it: it would hold port and memory against the next one.
"""

import os
import sys

from openforge.service import die_with_parent


def main() -> None:
    die_with_parent()
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()

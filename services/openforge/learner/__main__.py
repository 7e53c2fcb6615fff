"""`python -m openforge.learner`; under torchrun every rank runs this, and rank 0 alone is the service."""

from __future__ import annotations

import os
import sys

from openforge.learner.backends import fleet
from openforge.learner.service import serve
from openforge.learner.settings import Settings
from openforge.service import service_exit_code


def main() -> None:
    if fleet.is_follower():
        fleet.follow()
    code = service_exit_code("learner", Settings, serve)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a step that nobody waits for any more must not hold up the end


if __name__ == "__main__":
    main()

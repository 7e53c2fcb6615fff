"""The agent programs that people run: pinned, installed by themselves, started unattended against our proxy.

Promises: every harness is the published package, not changed in any file; what is installed says the version that
was pinned; a harness that is not here is an error that says how to get it.
"""

from openforge.harnesses.harness import Dialect, Harness, Launch, UnknownHarness
from openforge.harnesses.install import CannotInstall, NotInstalled, command, home_of, install, is_installed
from openforge.harnesses.table import ALL, find

__all__ = [
    "ALL",
    "CannotInstall",
    "Dialect",
    "Harness",
    "Launch",
    "NotInstalled",
    "UnknownHarness",
    "command",
    "find",
    "home_of",
    "install",
    "is_installed",
]

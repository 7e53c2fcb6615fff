"""What tests need of this host. A test skips with the reason where it is missing, unless `OPENFORGE_REQUIRE_SANDBOXES`
is set, as in CI: there nothing may be missing, and the test fails.
"""

import os
import shutil
from typing import NoReturn

import pytest


def needs(*programs: str) -> pytest.MarkDecorator:
    """Names or paths of programs."""
    missing = [program for program in programs if shutil.which(program) is None]
    reason = f"this host has no {', '.join(missing)}"
    return pytest.mark.skipif(bool(missing) and not _required(), reason=reason)


def cannot(why: str) -> NoReturn:
    """What the test needs cannot be made here."""
    if _required():
        raise RuntimeError(why)
    pytest.skip(why)


def _required() -> bool:
    return bool(os.environ.get("OPENFORGE_REQUIRE_SANDBOXES"))

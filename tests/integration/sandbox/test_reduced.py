"""Reduced isolation, for who is not root: weaker, and it says so."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
from needed import cannot

PROGRAM = Path(__file__).parents[2] / "support" / "reduced_trial.py"
SOMEBODY = "54321"


def command_of_an_ordinary_user() -> list[str]:
    if os.geteuid() != 0:
        return [sys.executable]
    return ["setpriv", "--reuid", SOMEBODY, "--regid", SOMEBODY, "--clear-groups", "/usr/bin/python3"]


def test_reduced_isolation_keeps_what_it_can_promise() -> None:
    packages = Path(msgspec.__file__).parents[1]
    env = {
        "PATH": os.environ["PATH"],
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": os.pathsep.join([*sys.path, str(packages)]),
    }
    probe = subprocess.run([*command_of_an_ordinary_user(), "-c", "import msgspec"], env=env, capture_output=True)
    if probe.returncode or not shutil.which("bwrap"):
        cannot("no interpreter that an ordinary user can start with our packages, or no bubblewrap")
    with tempfile.TemporaryDirectory(prefix="of-reduced-") as folder:
        Path(folder).chmod(0o777)
        tried = subprocess.run(
            [*command_of_an_ordinary_user(), str(PROGRAM), folder], env=env, capture_output=True, text=True, timeout=120
        )
    assert tried.returncode == 0, tried.stderr
    assert len(tried.stdout.splitlines()) == 7
    assert tried.stderr == ""

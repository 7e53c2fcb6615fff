"""Whoever installs the package and checks types sees the client's, and not `Any`."""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[3]
CONSUMER = """
from openforge.client import Client

async def main() -> None:
    async with Client.connect() as client:
        async for told in client.trajectories(run="r"):
            print(told.fact.reward + 1, told.fact.rewards)
"""


def test_a_consumer_that_misspells_a_field_is_told_by_its_type_checker(tmp_path: Path) -> None:
    venv.create(tmp_path / "env")
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    installed = (ROOT / "libs", ROOT / "protos", sysconfig.get_path("purelib"))
    (site / "openforge.pth").write_text("".join(f"{path}\n" for path in installed))
    (tmp_path / "consumer.py").write_text(CONSUMER)
    done = subprocess.run(
        (sys.executable, "-m", "mypy", "--strict", "--python-executable", tmp_path / "env/bin/python", "consumer.py"),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    (error, _) = done.stdout.splitlines()
    assert '"TrajectoryVerified" has no attribute "rewards"' in error

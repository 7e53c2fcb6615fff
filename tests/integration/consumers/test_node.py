"""The consumer in Node sees every trajectory once, and the numbers that were told."""

import shutil
import subprocess
from pathlib import Path

import pytest
from consumers import ROOT, reads_every_trajectory_once_over_restarts
from needed import needs

pytestmark = needs("node", "npm")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example with the packages that its lock file names."""
    folder = tmp_path_factory.mktemp("node") / "consumer"
    shutil.copytree(ROOT / "examples/consumers/node", folder, ignore=shutil.ignore_patterns("node_modules"))
    subprocess.run(
        ("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"), cwd=folder, check=True, timeout=600, stdout=2
    )
    return folder / "consumer.mjs"


async def test_every_trajectory_once_with_its_values_over_restarts_of_server_and_consumer(
    program: Path, tmp_path: Path
) -> None:
    await reads_every_trajectory_once_over_restarts(("node", str(program)), tmp_path)

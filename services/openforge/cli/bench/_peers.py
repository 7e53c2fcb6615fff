"""Other projects that a measurement is made beside: each in a venv of its own below one folder.

Promises: nothing of a peer comes into this project's environment; a peer that cannot be installed is told with the
reason.
"""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path


class NotMeasured(Exception):
    """Why a peer has no figures."""


async def installed(name: str, version: str, requirements: Sequence[str], folder: Path) -> Path:
    """The interpreter of the peer's venv below `folder`, made where it is missing. Raises `NotMeasured`."""
    venv = folder / name
    python = venv / "bin" / "python"
    done = venv / f"installed-{version}"
    if not done.exists():
        await _ran(sys.executable, "-m", "venv", str(venv))
        await _ran(str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *requirements)
        done.touch()
    return python


async def _ran(*command: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    _, said = await process.communicate()
    if process.returncode:
        lines = said.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        raise NotMeasured(f"it cannot be installed: {lines[-1]}")

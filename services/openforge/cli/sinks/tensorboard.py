"""TensorBoard's event files.

Promises: a folder that is written to again shows each point once: what older files have is purged.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter


class TensorBoard:
    def __init__(self, folder: Path) -> None:
        again = any(folder.glob("events.out.tfevents.*"))
        self._writer = SummaryWriter(str(folder), purge_step=0 if again else None)

    def point(self, version: int, values: Mapping[str, float], at: float) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, version, walltime=at)

    def episode(self, row: Mapping[str, Any]) -> None:
        """Curves only."""

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

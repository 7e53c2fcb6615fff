"""The figures of a run as they become known.

Promises: the file holds all rows that were shown, in the order of the table, and is whole at any time.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from openforge.cli.conformance.row import Row


class Figures:
    """`jobs` are harnesses and scenarios in the order of the table; others come after them, as they came."""

    def __init__(self, out: Path, jobs: Sequence[tuple[str, str]] = ()) -> None:
        self.out = out
        self.rows: list[Row] = []
        self._place = {job: place for place, job in enumerate(jobs)}

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.rows.sort(key=lambda row: self._place.get((row.harness, row.scenario), len(self._place)))
        self._write()

    def _write(self) -> None:
        self.out.parent.mkdir(parents=True, exist_ok=True)
        scratch = self.out.with_suffix(".tmp")
        scratch.write_bytes(msgspec.json.format(msgspec.json.encode(self.rows), indent=1) + b"\n")
        scratch.replace(self.out)

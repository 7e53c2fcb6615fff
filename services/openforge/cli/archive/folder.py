"""Writing the folder: facts as they were told, and tables that `datasets.load_dataset` reads.

Promises: the folder appears when it is whole; memory holds some rows of each table, never a run.
"""

import shutil
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from openforge.bus import KINDS, Bus, Undecodable
from openforge.bus.envelope import decode
from openforge.cli.archive import facts, tables
from openforge.protos import TrajectoryVerified, TurnRecorded

_CARD = """---
configs:
- config_name: sequences
  default: true
  data_files: sequences/*.parquet
- config_name: episodes
  data_files: episodes/*.parquet
- config_name: turns
  data_files: turns/*.parquet
tags:
- openforge
---

# Run {run}

Written by `openforge export`. `load_dataset(".", "sequences")` gives training sequences with token ids, log-probs and
rewards; `episodes` one row for each attempt; `turns` one for each model call. `facts/` holds every fact byte for byte:
`openforge import` puts them on a bus again.
"""


class NotEmpty(ValueError):
    """There is something in the way."""


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """How many rows were written. `unreadable` facts are in `facts/` and in no table."""

    facts: int
    episodes: int
    turns: int
    sequences: int
    unreadable: int


async def export(bus: Bus, run: str, out: Path) -> Counts:
    """Everything that was told of the run up to now. Raises `NotEmpty`."""
    scratch = _begin(out)
    counts = await _write(bus, run, scratch)
    _finish(scratch, run, out)
    return counts


def _begin(out: Path) -> Path:
    """Where to write until it is whole."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise NotEmpty(f"--out {out} exists and is not empty: name a new folder, or remove it")
    scratch = out.with_name(f"{out.name}.partial")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    return scratch


def _finish(scratch: Path, run: str, out: Path) -> None:
    (scratch / "README.md").write_text(_CARD.format(run=run))
    if out.exists():
        out.rmdir()
    scratch.rename(out)


async def _write(bus: Bus, run: str, folder: Path) -> Counts:
    episodes, unreadable = tables.Episodes(), 0
    with ExitStack() as stack:
        turns = stack.enter_context(_Table(folder / "turns" / "part-0.parquet", tables.TURNS))
        sequences = stack.enter_context(_Table(folder / "sequences" / "part-0.parquet", tables.SEQUENCES))
        attempts = stack.enter_context(_Table(folder / "episodes" / "part-0.parquet", tables.EPISODES))
        told = 0
        for kind in KINDS:
            with _Table(facts.file_of(folder, kind), facts.SCHEMA) as raw:
                async for place, data in bus.as_told(kind, run):
                    raw.add([facts.Record(place.at, place.sequence, place.subject, data)._asdict()])
                    try:
                        fact = decode(place.subject, data)
                    except Undecodable:
                        unreadable += 1
                        continue
                    episodes.apply(fact, place.at)
                    if isinstance(fact, TurnRecorded):
                        turns.add([tables.turn_row(fact)])
                    elif isinstance(fact, TrajectoryVerified):
                        sequences.add(tables.sequence_rows(fact))
                told += raw.count
        attempts.add(episodes.rows())
    return Counts(
        facts=told, episodes=attempts.count, turns=turns.count, sequences=sequences.count, unreadable=unreadable
    )


class _Table:
    """One parquet file, written in row groups."""

    ROWS = 512

    def __init__(self, file: Path, schema: pa.Schema) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self.count = 0
        self._schema = schema
        self._rows: list[dict[str, Any]] = []
        self._writer = pq.ParquetWriter(file, schema, compression="zstd")

    def __enter__(self) -> "_Table":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._flush()
            self._writer.close()
        else:
            with suppress(pa.ArrowInvalid, OSError):  # what broke is told, not that the file then has no end
                self._writer.close()

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        for row in rows:
            self._rows.append(row)
            self.count += 1
            if len(self._rows) >= self.ROWS:
                self._flush()

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_table(pa.Table.from_pylist(self._rows, schema=self._schema))
            self._rows.clear()

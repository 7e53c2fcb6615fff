"""The facts of a run, byte for byte, in `facts/<kind>.parquet`.

Promises: what is read here is what was told, in an order in which it was told: that of each stream, and between streams
that of time.
"""

import heapq
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from openforge.bus import KINDS

FACTS = "facts"
SCHEMA = pa.schema(
    [
        ("at", pa.float64()),
        ("sequence", pa.int64()),
        ("subject", pa.string()),
        ("data", pa.binary()),
    ]
)
_ROWS = 256


class BadArchive(ValueError):
    """The folder is no export of a run."""


class Record(NamedTuple):
    """One fact: when it was stored (Unix seconds), its place in the stream it came from, subject and MessagePack."""

    at: float
    sequence: int
    subject: str
    data: bytes


def file_of(folder: Path, kind: str) -> Path:
    return folder / FACTS / f"{kind}.parquet"


def facts_in(folder: Path, kinds: Iterable[str] = KINDS) -> Iterator[Record]:
    """Every fact of these kinds; raises `BadArchive`."""
    return heapq.merge(*(_records(file_of(folder, kind)) for kind in kinds), key=lambda record: record.at)


def run_of(folder: Path) -> str:
    """The run that lies in the folder; raises `BadArchive`."""
    first = next(_records(file_of(folder, "run")), None)
    if first is None:
        raise BadArchive(f"{folder} holds no run: {file_of(folder, 'run')} is empty")
    return first.subject.split(".")[1]


def _records(file: Path) -> Iterator[Record]:
    try:
        parquet = pq.ParquetFile(file)
    except (OSError, pa.ArrowInvalid) as error:
        raise BadArchive(f"{file} cannot be read ({error}): name a folder that `openforge export` wrote") from error
    with parquet:
        for batch in parquet.iter_batches(batch_size=_ROWS):
            yield from (Record(**row) for row in batch.to_pylist())

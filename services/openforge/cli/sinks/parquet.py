"""Two parquet files, `points.parquet` (version, name, value, at) and `episodes.parquet`.

Promises: each file is always whole (renamed into place) and holds all that was told up to the last flush, once.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

_POINTS = pa.schema([("version", pa.int64()), ("name", pa.string()), ("value", pa.float64()), ("at", pa.float64())])
_EPISODES = pa.schema(
    [
        *((name, pa.string()) for name in ("run", "episode")),
        ("attempt", pa.int32()),
        *((name, pa.string()) for name in ("purpose", "env", "task", "harness")),
        ("reward", pa.float64()),
        ("ended", pa.string()),
        ("turns", pa.int32()),
        ("sampled_tokens", pa.int64()),
        ("oldest_version", pa.int64()),
        ("at", pa.float64()),
    ]
)


class Parquet:
    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._points: dict[tuple[int, str], dict[str, Any]] = {}
        self._episodes: list[Mapping[str, Any]] = []

    def point(self, version: int, values: Mapping[str, float], at: float) -> None:
        for name, value in values.items():
            self._points[version, name] = {"version": version, "name": name, "value": value, "at": at}

    def episode(self, row: Mapping[str, Any]) -> None:
        self._episodes.append(row)

    def flush(self) -> None:
        self._write("points", pa.Table.from_pylist(list(self._points.values()), _POINTS))
        self._write("episodes", pa.Table.from_pylist(self._episodes, _EPISODES))

    def close(self) -> None:
        self.flush()

    def _write(self, name: str, table: pa.Table) -> None:
        scratch = self._folder / f".{name}.parquet"
        pq.write_table(table, scratch)
        scratch.replace(self._folder / f"{name}.parquet")

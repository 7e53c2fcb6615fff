"""What a place for curves is to the feed."""

from collections.abc import Mapping
from typing import Any, Protocol


class Sink(Protocol):
    """`flush` makes everything visible that was said before it; `close` comes last."""

    def point(self, version: int, values: Mapping[str, float], at: float) -> None:
        """Numbers at a weight version, told at Unix time `at`."""
        ...

    def episode(self, row: Mapping[str, Any]) -> None:
        """One verdict, without its tokens."""
        ...

    def flush(self) -> None: ...

    def close(self) -> None: ...

"""Which experts engines sent the tokens of a sequence through, laid along its positions.

Promises: what is laid names experts that the model has; a token that no engine told of, or of which it told something
else than this model can do, has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from openforge.protos import BlobRef, Span, TrajectoryVerified
from openforge.wire.routed import NoRouting, extent_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Rows = NDArray[np.int16]
    """(T, layers, experts per token)"""

NONE = -1
"""In all places of a token of which nothing is known."""

Known = tuple[tuple[BlobRef, Span], ...]
"""A file, and the tokens that its first rows are of. Where several tell of a token the first one holds."""


class Mixture(msgspec.Struct, frozen=True):
    """What a model has of experts: each token goes through `per_token` of `experts` in each of its `layers`.

    `whole`: its backend replays a sequence or leaves it to the routers, and never single tokens of one.
    """

    layers: int
    experts: int
    per_token: int
    whole: bool = False


class Routing(msgspec.Struct, frozen=True):
    """int16 (T, layers, experts per token), `NONE` where nothing is known."""

    packed: bytes
    layers: int
    per_token: int

    def rows(self) -> Rows:
        import numpy as np

        return np.frombuffer(self.packed, np.int16).reshape(-1, self.layers, self.per_token)


class Replay(msgspec.Struct, frozen=True):
    """What a step needs to send tokens where they went: the model's mixture and the files by digest."""

    mixture: Mixture
    files: Mapping[str, bytes]

    def laid(self, length: int, known: Known) -> Routing | None:
        """Of the first `length` tokens; None where nothing is known of any of them, or where wholes alone are replayed
        and nothing is known of one."""
        import numpy as np

        rows = np.full((length, self.mixture.layers, self.mixture.per_token), NONE, np.int16)
        for ref, span in known:
            told = _told(self.files[ref.digest], self.mixture)
            if told is not None and len(told) >= span.length:
                within = max(0, min(span.length, length - span.start))
                _fill(rows, np.arange(span.start, span.start + within), told[:within])
        known_T = rows[:, 0, 0] != NONE
        if not known_T.any() or (self.mixture.whole and not known_T.all()):
            return None
        return Routing(rows.tobytes(), self.mixture.layers, self.mixture.per_token)


def along(length: int, routed: Sequence[tuple[list[int], Routing]]) -> Routing | None:
    """Of `length` tokens of a row, from sequences whose first tokens stand at the places of a path."""
    import numpy as np

    if not routed:
        return None
    first = routed[0][1]
    rows = np.full((length, first.layers, first.per_token), NONE, np.int16)
    for path, routing in routed:
        _fill(rows, np.array(path), routing.rows()[: len(path)])
    return Routing(rows.tobytes(), first.layers, first.per_token)


def _fill(rows: Rows, at: NDArray[np.intp], told: Rows) -> None:
    """Write what is told where nothing is known yet."""
    unknown = rows[at, 0, 0] == NONE
    rows[at[unknown]] = told[unknown]


def files_of(members: Iterable[TrajectoryVerified]) -> tuple[BlobRef, ...]:
    """All files that tell of their experts, each once."""
    refs = (ref for member in members for sequence in member.sequences for ref in sequence.routed_experts)
    return tuple({ref.digest: ref for ref in refs}.values())


def replayed_share(routings: Iterable[tuple[Routing | None, int]]) -> float:
    """Of the tokens of sequences, each with how many it has, the share whose experts are known."""
    known = total = 0
    for routing, length in routings:
        total += length
        known += 0 if routing is None else int((routing.rows()[:, 0, 0] != NONE).sum())
    return known / total if total else 0.0


def _told(file: bytes, mixture: Mixture) -> Rows | None:
    """None where it is no such file, or is of another model."""
    import numpy as np

    try:
        extent = extent_of(file)
    except NoRouting:
        return None
    if (extent.layers, extent.experts) != (mixture.layers, mixture.per_token):
        return None
    numbers = extent.tokens * extent.layers * extent.experts
    width = f"<u{extent.width}"
    told = np.frombuffer(file[len(file) - numbers * extent.width :], width).reshape(-1, extent.layers, extent.experts)
    return None if told.size and told.max() >= mixture.experts else told.astype(np.int16)

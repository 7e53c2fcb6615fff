"""Which experts a mixture chose, token by token, for one request.

Promises: a row for every token that was computed, all but the last one sampled, in order; what was chosen when a token
was first computed stays, for its log-prob came of it, also if the token is computed anew under other weights.
"""

import base64
import io
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Chosen = NDArray[np.unsignedinteger[Any]]
"""(tokens, layers, experts per token); layers without experts have zeros."""


def rows_of(chosen: list[torch.Tensor], experts: int) -> Chosen:
    """From each layer's choice (T, experts per token); the narrowest integers that can name every expert, as vLLM."""
    rows: Chosen = torch.stack(chosen, dim=1).numpy().astype(np.uint8 if experts <= 256 else np.uint16)
    return rows


def written(rows: Chosen) -> str:
    """As on vLLM's wire: an .npy file in base64."""
    with io.BytesIO() as file:
        np.save(file, rows, allow_pickle=False)
        return base64.b64encode(file.getbuffer()).decode("ascii")


class Routed:
    def __init__(self) -> None:
        self._first: list[Chosen] = []
        self._now: list[Chosen] = []

    def add(self, rows: Chosen) -> None:
        """The next tokens, as the weights of now computed them."""
        self._now.append(rows)

    def begin_anew(self) -> None:
        """All tokens will be computed again, by other weights."""
        if (first := self.first()) is not None:
            self._first, self._now = [first], []

    def first(self) -> Chosen | None:
        """As each token was first computed; None before there is any."""
        if not self._first and not self._now:
            return None
        known = sum(len(rows) for rows in self._first)
        return np.concatenate([*self._first, *_after(self._now, known)])

    def now(self) -> Chosen:
        """As the keys and values that are there now were computed."""
        return np.concatenate(self._now)


def _after(parts: list[Chosen], start: int) -> list[Chosen]:
    """What the parts hold from token `start` on."""
    found = []
    for rows in parts:
        found.append(rows[start:])
        start = max(0, start - len(rows))
    return found

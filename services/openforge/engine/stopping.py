"""When an answer ends.

Promises: the token that ends it is part of it; a stop string counts only where the answer itself holds it.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

_SPLIT_CHARACTERS = 4  # a character can lie across this many byte tokens


class Ended(msgspec.Struct, frozen=True):
    """`reason` is null for the model's own end token, else the id or string that was asked for."""

    finish: Literal["stop", "length", "abort"]
    reason: int | str | None = None


class StopRule(msgspec.Struct, frozen=True):
    """`decode` turns ids to text. `longest` is the number of tokens that the answer may have at most."""

    end_token_ids: frozenset[int]
    stop_token_ids: frozenset[int]
    stop: tuple[str, ...]
    longest: int
    decode: Callable[[Sequence[int]], str]

    def ended(self, sampled: Sequence[int]) -> Ended | None:
        """Does the answer end with its last token? To be asked after each token."""
        last = sampled[-1]
        if last in self.end_token_ids:
            return Ended("stop")
        if last in self.stop_token_ids:
            return Ended("stop", last)
        for text in self.stop:
            window = len(text.encode()) + _SPLIT_CHARACTERS
            if text in self.decode(sampled[-window:]):
                return Ended("stop", text)
        return Ended("length") if len(sampled) >= self.longest else None

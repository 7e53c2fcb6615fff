"""Answers as text while they are being sampled.

Promises: what was given out stays the beginning of the final content, whatever is sampled later; no half
of a character, of a stop string or of a tool call ever goes out.
"""

from collections.abc import Callable, Sequence

_HALF = "\ufffd"


class IncrementalText:
    """Token ids to text, piece by piece, each piece ending on a character boundary.

    Only the last few tokens are decoded again, so a long answer costs no more per token than a short one.
    """

    def __init__(self, text: Callable[[Sequence[int]], str]) -> None:
        self._text = text
        self._window: list[int] = []
        self._told = 0

    def push(self, ids: Sequence[int]) -> str:
        self._window += ids
        now = self._text(self._window)
        sure = len(now) - _unfinished(now)
        fresh = now[self._told : sure]
        self._told = max(self._told, sure)
        if sure == len(now) or len(self._window) > _WINDOW:
            self._shrink()
        return fresh

    def flush(self) -> str:
        """What is left at the end, half characters as U+FFFD."""
        fresh = self._text(self._window)[self._told :]
        self._window, self._told = [], 0
        return fresh

    def _shrink(self) -> None:
        """Keeps a little left context: a decoder may treat the first token of a text in its own way."""
        self._window = self._window[-4:]
        now = self._text(self._window)
        self._told = len(now) - _unfinished(now)


_WINDOW = 32


def _unfinished(text: str) -> int:
    """How many characters at the end may still become others: at most three bytes of one character."""
    return next((size for size in range(3) if not text[: len(text) - size].endswith(_HALF)), 3)


class SafeContent:
    """Holds text back until it is certain to be content.

    `stops` end the answer and are cut. From the first of `holds` on, everything waits for the end, and so does
    white space in front of it.
    """

    def __init__(self, stops: Sequence[str], holds: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._holds = [hold for hold in holds if hold]
        self._pending = ""
        self._closed = False

    def push(self, text: str) -> str:
        if self._closed:
            return ""
        self._pending += text
        found = [at for mark in (*self._stops, *self._holds) if (at := self._pending.find(mark)) >= 0]
        self._closed = bool(found)
        cut = min(found) if found else len(self._pending) - self._unsure()
        safe = self._pending[:cut]
        if self._holds:
            safe = safe.rstrip()
        self._pending = self._pending[len(safe) :]
        return safe

    def _unsure(self) -> int:
        """The length of the longest tail that may become a mark."""
        marks = (*self._stops, *self._holds)
        longest = max((len(mark) for mark in marks), default=1) - 1
        for size in range(min(longest, len(self._pending)), 0, -1):
            tail = self._pending[-size:]
            if any(mark.startswith(tail) for mark in marks):
                return size
        return 0


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """`text` up to the first stop string in it."""
    found = [at for stop in stops if stop and (at := text.find(stop)) >= 0]
    return text[: min(found)] if found else text

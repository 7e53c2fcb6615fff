"""Answers as text while they are being sampled.

Promises: what was given out stays the beginning of the final reasoning and of the final content, whatever is
sampled later; no half of a character, of a stop string or of a tool call ever goes out.
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
        self._marks = [mark for mark in (*stops, *holds) if mark]
        self._strips = any(holds)
        self._pending = ""
        self._closed = False

    def push(self, text: str) -> str:
        if self._closed:
            return ""
        self._pending += text
        found = [at for mark in self._marks if (at := self._pending.find(mark)) >= 0]
        self._closed = bool(found)
        safe = self._pending[: min(found) if found else len(self._pending) - _unsure(self._pending, self._marks)]
        if self._strips:
            safe = safe.rstrip()
        self._pending = self._pending[len(safe) :]
        return safe


class SafeAnswer:
    """Tells the reasoning at the beginning of an answer from its content, and holds back what is not certain.

    `thinking` stands before and after reasoning; `stops` and `holds` are those of `SafeContent`.
    """

    def __init__(self, thinking: tuple[str, str] | None, stops: Sequence[str], holds: Sequence[str]) -> None:
        self._opens, self._closes = thinking or ("", "")
        self._stops = [stop for stop in stops if stop]
        self._content = SafeContent(stops, holds)
        self._pending = ""
        self._step = self._begin if thinking else self._tell
        self._blank = True

    def push(self, text: str) -> tuple[str, str]:
        """Reasoning and content that may be shown now."""
        return self._step(text)

    def _begin(self, text: str) -> tuple[str, str]:
        self._pending += text
        opened = self._pending.lstrip()
        if opened.startswith(self._opens):
            self._step, self._pending = self._think, ""
            return self._think(opened[len(self._opens) :])
        if self._opens.startswith(opened):
            return "", ""
        self._step = self._tell
        return self._tell(self._pending)

    def _think(self, text: str) -> tuple[str, str]:
        self._pending += text
        if self._blank:
            self._pending = self._pending.lstrip("\n")
            self._blank = not self._pending
        closed = self._pending.find(self._closes)
        stopped = min((at for stop in self._stops if (at := self._pending.find(stop)) >= 0), default=-1)
        if stopped >= 0 and (closed < 0 or stopped < closed):
            self._step = self._nothing
            return self._pending[:stopped].rstrip("\n"), ""
        if closed >= 0:
            thought, rest = self._pending[:closed].rstrip("\n"), self._pending[closed + len(self._closes) :]
            self._step = self._skip_lines
            return thought, self._skip_lines(rest)[1]
        sure = self._pending[: len(self._pending) - _unsure(self._pending, (*self._stops, self._closes))]
        thought = sure.rstrip("\n")
        self._pending = self._pending[len(thought) :]
        return thought, ""

    def _skip_lines(self, text: str) -> tuple[str, str]:
        text = text.lstrip("\n")
        if not text:
            return "", ""
        self._step = self._tell
        return self._tell(text)

    def _tell(self, text: str) -> tuple[str, str]:
        return "", self._content.push(text)

    def _nothing(self, text: str) -> tuple[str, str]:
        return "", ""


def _unsure(text: str, marks: Sequence[str]) -> int:
    """The length of the longest tail that may become a mark."""
    longest = max((len(mark) for mark in marks), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        tail = text[-size:]
        if any(mark.startswith(tail) for mark in marks):
            return size
    return 0


def reasoning_length(text: Callable[[Sequence[int]], str], ids: Sequence[int], closes: str) -> int:
    """How many ids of an answer that begins with reasoning are reasoning, its end mark included."""
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if closes in text(ids[:middle]) else (middle + 1, high)
    return low


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """`text` up to the first stop string in it."""
    stop = first_stop(text, stops)
    return text[: text.find(stop)] if stop else text


def first_stop(text: str, stops: Sequence[str]) -> str:
    """The stop string that comes first in `text`; empty where there is none."""
    return min((stop for stop in stops if stop and stop in text), key=text.find, default="")

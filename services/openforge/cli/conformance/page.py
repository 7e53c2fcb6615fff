"""The table of `docs/conformance.md`, written by the command between two marks; the words around it are a person's."""

from collections.abc import Sequence
from pathlib import Path

from openforge.cli.conformance.row import Row

_BEGIN, _END = "<!-- table: written by `openforge conformance --docs` -->", "<!-- end of table -->"
_HEAD = (
    "| harness | version | dialect | scenario | calls | branches | sequences | longest sequence, tokens "
    "| delivered_fraction | log-prob off by | what breaks, and why |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|\n"
)


def write_page(page: Path, rows: Sequence[Row]) -> None:
    """Replaces the table in `page`. Raises `ValueError` where the page has no place for it."""
    text = page.read_text(encoding="utf-8")
    if _BEGIN not in text or _END not in text:
        raise ValueError(f"{page} has no place for the table: put {_BEGIN} and {_END} on lines of their own")
    before, after = text.partition(_BEGIN)[0], text.partition(_END)[2]
    page.write_text(f"{before}{_BEGIN}\n{table(rows)}{_END}{after}", encoding="utf-8")


def table(rows: Sequence[Row]) -> str:
    return _HEAD + "".join(map(_line, rows))


def _line(row: Row) -> str:
    off = "-" if row.logprob_max_diff is None else f"{row.logprob_max_diff:.1e}"
    cells = (
        row.harness,
        row.version,
        row.dialect,
        row.scenario,
        row.calls,
        row.branches,
        row.sequences,
        row.prompt_tokens,
        f"{row.delivered_fraction:.3f}",
        off,
        _what_breaks(row),
    )
    return "| " + " | ".join(map(str, cells)) + " |\n"


def _what_breaks(row: Row) -> str:
    parts = [
        "" if row.ok else "**not ok**",
        ", ".join(f"{count} {cause}" for cause, count in row.breaks.items()),
        ", ".join(f"{tokens} tokens {reason}" for reason, tokens in row.dropped.items()),
        row.note.replace("|", "/").replace("\n", " ")[:300],
    ]
    return "; ".join(part for part in parts if part) or "-"


def said(row: Row) -> str:
    """The line as a terminal shows it."""
    off = "-" if row.logprob_max_diff is None else f"{row.logprob_max_diff:.1e}"
    figures = (
        f"{row.harness:<15} {row.scenario:<11}{'ok' if row.ok else 'NOT OK':<7}{row.calls:>3} calls"
        f"{row.branches:>3} branches{row.sequences:>3} sequences{row.prompt_tokens:>7} tokens"
        f"  delivered {row.delivered_fraction:.3f}  off by {off}  {row.agent_s:.1f} s"
    )
    return f"{figures}  {row.note}" if row.note else figures

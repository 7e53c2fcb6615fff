"""What an evaluation leaves: the table on the terminal, `eval.json`, `eval.html`, `trials.parquet`.

Promises: each file is whole or not there; a value that nothing is known of is a dash, never a 0.
"""

import html
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import pyarrow
from plotly import graph_objects as go
from plotly import offline
from pyarrow import parquet

from openforge.runs.evaluation import Estimate, Evaluation, HarnessResult
from openforge.runs.trials import Trial

Row = tuple[str, ...]

_STYLE = """body { margin: 0 auto; max-width: 1100px; padding: 1.5rem; font: 15px/1.5 system-ui, sans-serif }
h2 { margin: 2rem 0 .5rem; border-bottom: 1px solid #d5dbe1 } table { border-collapse: collapse }
td, th { padding: .15rem .7rem; border-bottom: 1px solid #e6eaee; text-align: left }"""

_COLUMNS = pyarrow.schema(
    [
        ("run", pyarrow.string()),
        ("harness", pyarrow.string()),
        ("task", pyarrow.string()),
        ("seed", pyarrow.int64()),
        ("instance", pyarrow.string()),
        ("episode", pyarrow.string()),
        ("attempts", pyarrow.int32()),
        ("passed", pyarrow.bool_()),
        ("reward", pyarrow.float64()),
        ("failed", pyarrow.string()),
        ("ended", pyarrow.string()),
        ("version", pyarrow.int64()),
        ("turns", pyarrow.int32()),
        ("sampled_tokens", pyarrow.int64()),
        ("agent_s", pyarrow.float64()),
        ("metrics", pyarrow.map_(pyarrow.string(), pyarrow.float64())),
    ]
)


def write_outcome(folder: Path, evaluation: Evaluation, trials: Mapping[str, Sequence[Trial]]) -> None:
    """All three files, into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [row for harness in trials.values() for row in harness]
    text = msgspec.json.format(msgspec.json.encode(evaluation), indent=2) + b"\n"
    _whole(folder / "eval.json", lambda file: file.write_bytes(text))
    _whole(folder / "eval.html", lambda file: file.write_text(page(evaluation, rows)))
    _whole(folder / "trials.parquet", lambda file: parquet.write_table(table_of(rows), file))


def _whole(file: Path, write: Callable[[Path], object]) -> None:
    scratch = file.with_suffix(".tmp")
    write(scratch)
    scratch.replace(file)


def table_of(rows: Sequence[Trial]) -> pyarrow.Table:
    """One row for each trial."""
    said = [msgspec.structs.asdict(row) | {"metrics": list(row.metrics.items())} for row in rows]
    return pyarrow.Table.from_pylist(said, schema=_COLUMNS)


def lines(evaluation: Evaluation) -> Iterator[str]:
    """The tables as text."""
    yield f"{evaluation.name}: {evaluation.model}, {evaluation.trials_per_task} trials a task"
    for rows in (table(evaluation), differences(evaluation), behaviour(evaluation)):
        if len(rows) > 1:
            yield ""
            yield from _aligned(rows)
    yield ""
    yield f"intervals: {evaluation.interval} ({evaluation.seed}); trials without a verdict are not counted as failures"


def table(evaluation: Evaluation) -> list[Row]:
    """A row for each harness, below a row of names."""
    passes = evaluation.harnesses[0].passes if evaluation.harnesses else ()
    head: Row = ("harness", "tasks", "trials", "no verdict", "mean reward", *(p.estimator for p in passes), "lost to")
    return [head, *(_row(result) for result in evaluation.harnesses)]


def _row(result: HarnessResult) -> Row:
    return (
        result.harness,
        str(result.tasks),
        str(result.trials),
        str(result.without_verdict),
        told(result.reward),
        *(told(one.estimate) for one in result.passes),
        _counted(result.failed_attempts),
    )


def differences(evaluation: Evaluation) -> list[Row]:
    head: Row = ("success of", "minus that of", "difference", "tasks of both")
    rows = [(d.harness, d.than, told(d.estimate, "+.3f"), str(d.estimate.tasks)) for d in evaluation.differences]
    return [head, *rows]


def behaviour(evaluation: Evaluation) -> list[Row]:
    names = sorted({n for r in evaluation.harnesses for counts in r.behaviour.values() for n in counts})
    rows: list[Row] = [("harness", "weight version", *(name.replace("_", " ") for name in names))]
    for result in evaluation.harnesses:
        for version, counts in result.behaviour.items():
            rows.append(
                (result.harness, version, *(f"{counts[name]:.2f}" if name in counts else "-" for name in names))
            )
    return rows


def causes(evaluation: Evaluation) -> list[Row]:
    rows: list[Row] = [("harness", "how trials ended", "trials without verdict", "attempts without verdict")]
    for result in evaluation.harnesses:
        counts = (result.ends, result.failures, result.failed_attempts)
        rows.append((result.harness, *map(_counted, counts)))
    return rows


def by_task(rows: Sequence[Trial]) -> list[Row]:
    """Passed of judged trials, for each drawn task and harness."""
    harnesses = list(dict.fromkeys(row.harness for row in rows))
    shown: list[Row] = [("task", *harnesses)]
    for instance in sorted({row.instance for row in rows}):
        cells = ([row for row in rows if row.instance == instance and row.harness == h] for h in harnesses)
        shown.append((instance, *(_passed_of(cell) for cell in cells)))
    return shown


def _passed_of(rows: Sequence[Trial]) -> str:
    judged = [row for row in rows if row.passed is not None]
    return f"{sum(row.passed is True for row in judged)} of {len(judged)}"


def told(estimate: Estimate, form: str = ".3f") -> str:
    if estimate.value is None or estimate.low is None or estimate.high is None:
        return "-"
    return f"{estimate.value:{form}} [{estimate.low:{form}}, {estimate.high:{form}}]"


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "-"


def page(evaluation: Evaluation, rows: Sequence[Trial]) -> str:
    """One self-contained HTML page."""
    title = html.escape(f"Evaluation {evaluation.name}")
    parts = {
        "Harnesses": _html(table(evaluation)) + _figure(evaluation),
        "Differences": _html(differences(evaluation)),
        "What ended how": _html(causes(evaluation)),
        "Behaviour by weight version": _html(behaviour(evaluation)),
        "Tasks": _html(by_task(rows)),
    }
    body = "".join(f"<h2>{name}</h2>{part}" for name, part in parts.items())
    facts = html.escape(
        f"model {evaluation.model}; environment {evaluation.environment}; {evaluation.trials_per_task} trials a task; "
        f"seed {evaluation.seed}; intervals: {evaluation.interval}"
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f"<script>{offline.get_plotlyjs()}</script><h1>{title}</h1><p>{facts}</p>{body}</html>\n"
    )


def _figure(evaluation: Evaluation) -> str:
    figure = go.Figure(layout={"template": "plotly_white", "height": 320, "barmode": "group", "yaxis_range": [0, 1]})
    for result in evaluation.harnesses:
        known = [(p.estimator, p.estimate) for p in result.passes if p.estimate.value is not None]
        figure.add_bar(
            name=result.harness,
            x=[name for name, _ in known],
            y=[e.value for _, e in known],
            error_y={
                "array": [(e.high or 0.0) - (e.value or 0.0) for _, e in known],
                "arrayminus": [(e.value or 0.0) - (e.low or 0.0) for _, e in known],
            },
        )
    return str(figure.to_html(full_html=False, include_plotlyjs=False))


def _html(rows: Sequence[Row]) -> str:
    def line(cells: Iterable[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return f"<table>{line(rows[0], 'th')}{''.join(line(row, 'td') for row in rows[1:])}</table>"


def _aligned(rows: Sequence[Row]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()

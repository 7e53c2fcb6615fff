"""The story as HTML: figures, tables and a browser of episodes, in one file."""

import html
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from plotly import offline

from openforge.cli.ledger import lines
from openforge.cli.report.charts import figures
from openforge.cli.report.story import Episode, Story
from openforge.protos import TurnRecorded, unpack_ids, unpack_logprobs
from openforge.runs.ledger import Ledger

STARTED = ("task", "harness", "started", "trained", "retired", "failed or open")
TEMPLATE = Path(__file__).with_name("page.html")

Decode = Callable[[int], str]


def write_report(
    story: Story, ledger: Ledger, summary: dict[str, Any], decode: Decode, path: Path, *, episodes: int = 1000
) -> None:
    """Write the page; at most `episodes` of them can be opened, evenly over the run."""
    parts = {
        "RUN": html.escape(story.run),
        "PLOTLY": offline.get_plotlyjs(),
        "SUMMARY": _table(("", ""), [(name, _shown(value)) for name, value in summary.items()]),
        "LEDGER": _ledger(ledger),
        "FIGURES": "".join(
            f'<div class="figure">{figure.to_html(full_html=False, include_plotlyjs=False)}</div>'
            for figure in figures(story).values()
        ),
        "ENDS": _table(("how attempts ended", "n"), sorted(story.ends.items())),
        "FAILURES": _table(("attempts without a verdict, by cause", "n"), sorted(story.failures.items())),
        "RETIREMENTS": _table(("verified but not trained, by cause", "n"), sorted(story.retirements.items())),
        "BREAKS": _table(("turns that go on from no other, by cause", "n"), sorted(story.breaks.items())),
        "DROPPED": _table(("sampled tokens that are not trained, by reason", "n"), sorted(story.dropped.items())),
        "STARTED": _table(
            ("task", "harness", "started", "trained", "retired", "failed or open"), story.started_and_trained()
        ),
        "STALENESS": _table(("staleness", ""), story.staleness()),
        "LOSSES": _table(
            ("does what is lost depend on what it is?", "statistic", "p", "alarm", "effective of kept"), _losses(story)
        ),
        "LENGTHS": _table(
            ("mean sampled tokens", ""), [(name, f"{mean:.1f}") for name, mean in story.lengths().items()]
        ),
        "CONFIG": html.escape(msgspec.json.format(msgspec.json.encode(story.config), indent=2).decode()),
        "EPISODES": _script_json([_episode(episode, decode) for episode in _chosen(story, episodes)]),
    }
    page = TEMPLATE.read_text()
    scratch = path.with_suffix(".tmp")
    scratch.write_text(re.sub(r"@@([A-Z]+)@@", lambda match: parts[match.group(1)], page))
    scratch.replace(path)


def _losses(story: Story) -> Iterable[tuple[object, ...]]:
    for one in story.losses():
        kept = sum(one.started.values()) - sum(one.lost.values())
        yield (
            one.sentence(),
            f"{one.statistic:.2f}",
            f"{one.p_value:.4f}",
            "ALARM" if one.alarm else "no",
            f"{one.effective:.0f} of {kept}",
        )


def _chosen(story: Story, most: int) -> Iterable[Episode]:
    everyone = sorted(story.episodes.values(), key=lambda episode: (episode.purpose, episode.episode))
    stride = max(1, -(-len(everyone) // most))
    return everyone[::stride]


def _episode(episode: Episode, decode: Decode) -> dict[str, Any]:
    return {
        "name": episode.episode,
        "task": episode.task,
        "harness": episode.harness,
        "purpose": episode.purpose,
        "reward": episode.reward,
        "version": episode.version,
        "ended": episode.ended or next(reversed(episode.attempts.values()), "open"),
        "trained": episode.trained_in,
        "retired": episode.retired,
        "metrics": episode.metrics,
        "attempts": [
            {
                "attempt": attempt,
                "end": end,
                "detail": episode.details.get(attempt, ""),
                "turns": [_turn(turn, decode) for turn in sorted(episode.turns.get(attempt, []), key=lambda t: t.turn)],
            }
            for attempt, end in sorted(episode.attempts.items())
        ],
    }


def _turn(turn: TurnRecorded, decode: Decode) -> dict[str, Any]:
    ids, logprobs = unpack_ids(turn.sampled), unpack_logprobs(turn.logprobs)
    versions = [span.version for span in turn.versions for _ in range(span.length)]
    return {
        "turn": turn.turn,
        "parent": turn.parent,
        "cause": str(turn.cause),
        "status": str(turn.status),
        "finish": str(turn.finish),
        "messages": msgspec.json.decode(turn.messages) if turn.messages else [],
        "prompt": turn.prefix + len(turn.suffix) // 4,
        "tokens": [
            [decode(token), round(logprob, 3), version]
            for token, logprob, version in zip(ids, logprobs, versions, strict=False)
        ],
    }


def _ledger(ledger: Ledger) -> str:
    return "<pre>" + html.escape("\n".join(lines(ledger))) + "</pre>"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    cells = "".join(f"<tr>{''.join(f'<td>{html.escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{''.join(f'<th>{html.escape(name)}</th>' for name in head)}</tr>{cells}</table>"


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _script_json(value: object) -> str:
    """JSON that cannot end the script element it stands in."""
    return msgspec.json.encode(value).decode().replace("<", "\\u003c")

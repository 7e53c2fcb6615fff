"""What operators look at: Grafana's dashboard and the tables of docs/observability.md, made from two tables.

`python -m openforge.cli.dashboard` writes both; `--check` exits with 1 where they differ from the code.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from openforge.runs.metrics import METRICS
from openforge.service.metrics import PROCESS

DASHBOARD = Path("deploy/observability/dashboard.json")
DOCS = Path("docs/observability.md")
_WIDTH, _HEIGHT, _COLUMNS = 8, 7, 3


class Panel(msgspec.Struct, frozen=True):
    """`shows` is PromQL to legend."""

    title: str
    shows: dict[str, str]
    unit: str = "short"


PANELS: dict[str, tuple[Panel, ...]] = {
    "Is it learning?": (
        Panel("Reward of each batch", {'openforge_reward_mean{run=~"$run"}': "{{run}}"}),
        Panel("Held-out reward", {'openforge_heldout_reward_mean{run=~"$run"}': "{{run}} at {{version}}"}),
        Panel("Versions", {'openforge_trained_version{run=~"$run"}': "trained",
                           'openforge_served_version{run=~"$run"}': "served",
                           'openforge_steps_wanted{run=~"$run"}': "wanted"}),
    ),
    "How stale?": (
        Panel("Lag", {'openforge_lag{run=~"$run"}': "lag", 'openforge_lag_allowed{run=~"$run"}': "allowed"}),
        Panel("Trained tokens by age",
              {'sum by (lag) (rate(openforge_loss_tokens_total{run=~"$run"}[5m]))': "{{lag}} versions"}),
        Panel("Weight debt", {'openforge_weight_debt{run=~"$run"}': "{{run}}"}),
    ),
    "Who waits for whom?": (
        Panel("Attempts by stage", {'openforge_attempts{run=~"$run"}': "{{stage}}"}),
        Panel("Mean wait by stage",
              {'rate(openforge_stage_seconds_total{run=~"$run"}[5m])'
               ' / rate(openforge_stage_attempts_total{run=~"$run"}[5m])': "{{stage}}"}, "s"),
        Panel("Oldest attempt", {'time() - openforge_oldest_attempt_timestamp_seconds{run=~"$run"}': "{{stage}}"}, "s"),
        Panel("Engine time of each turn",
              {'rate(openforge_engine_seconds_total{run=~"$run"}[5m])'
               ' / ignoring (part) group_left rate(openforge_turns_total{run=~"$run"}[5m])': "{{part}}"}, "s"),
        Panel("Episodes allowed", {'openforge_in_flight_allowed{run=~"$run"}': "{{run}}"}),
        Panel("Engine requests", {'openforge_engine_requests{run=~"$run"}': "{{engine}} {{state}}"}),
        Panel("Engine memory in use", {'openforge_engine_kv_use{run=~"$run"}': "{{engine}}"}, "percentunit"),
        Panel("Learner busy", {'rate(openforge_step_seconds_total{run=~"$run"}[5m])': "{{run}}"}, "percentunit"),
        Panel("Sampled tokens", {'rate(openforge_sampled_tokens_total{run=~"$run"}[5m])': "{{run}}"}, "ops"),
    ),
    "What is lost, and why?": (
        Panel("Failed attempts", {'increase(openforge_failed_attempts_total{run=~"$run"}[15m])': "{{reason}}"}),
        Panel("Retired verdicts", {'increase(openforge_retired_total{run=~"$run"}[15m])': "{{reason}}"}),
        Panel("Lost share by task and harness",
              {'openforge_lost_share{run=~"$run"}': "{{dimension}} {{name}}"}, "percentunit"),
        Panel("Dropped tokens", {'rate(openforge_dropped_tokens_total{run=~"$run"}[5m])': "{{reason}}"}, "ops"),
        Panel("Dead letters", {"openforge_dead_letters": "{{service}}"}),
        Panel("Ledger differences", {'openforge_ledger_differences{run=~"$run"}': "{{run}}"}),
    ),
    "What does it cost, and is it true?": (
        Panel("Seconds for a trained token", {'openforge_cost_seconds_per_token{run=~"$run"}': "{{of}}"}, "s"),
        Panel("Sampled for a trained token", {'openforge_sampled_per_trained_token{run=~"$run"}': "{{run}}"}),
        Panel("Log-prob gap", {'openforge_logprob_gap_mean{run=~"$run"}': "batch",
                               'openforge_probe_error{run=~"$run"}': "probe {{engine}}"}),
    ),
}  # fmt: skip


def dashboard() -> dict[str, Any]:
    return {
        "title": "OpenForge",
        "uid": "openforge",
        "schemaVersion": 39,
        "editable": True,
        "time": {"from": "now-3h", "to": "now"},
        "refresh": "15s",
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus"},
                {
                    "name": "run",
                    "type": "query",
                    "datasource": {"type": "prometheus", "uid": "${datasource}"},
                    "query": "label_values(openforge_running, run)",
                    "includeAll": True,
                    "multi": True,
                    "refresh": 2,
                },
            ]
        },
        "panels": list(_panels()),
    }


def _panels() -> Iterator[dict[str, Any]]:
    number = top = 0
    for row, panels in PANELS.items():
        number += 1
        place = {"x": 0, "y": top, "w": _WIDTH * _COLUMNS, "h": 1}
        yield {"id": number, "type": "row", "title": row, "gridPos": place, "panels": []}
        top += 1
        for index, panel in enumerate(panels):
            number += 1
            x, y = index % _COLUMNS * _WIDTH, top + index // _COLUMNS * _HEIGHT
            yield _panel(panel, number, {"x": x, "y": y, "w": _WIDTH, "h": _HEIGHT})
        top += -(-len(panels) // _COLUMNS) * _HEIGHT


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "gridPos": place,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": expression, "legendFormat": legend}
            for index, (expression, legend) in enumerate(panel.shows.items())
        ],
    }


def documents() -> dict[Path, str]:
    """Path to content, from the folder of the repository."""
    before, _, rest = DOCS.read_text().partition("<!-- numbers -->\n")
    after = rest.partition("<!-- /numbers -->\n")[2]
    table = "\n".join(_table())
    return {
        DASHBOARD: msgspec.json.format(msgspec.json.encode(dashboard()), indent=1).decode() + "\n",
        DOCS: f"{before}<!-- numbers -->\n{table}\n<!-- /numbers -->\n{after}",
    }


def _table() -> Iterator[str]:
    yield "| name in Prometheus | labels | what it is |"
    yield "|---|---|---|"
    for name, metric in METRICS.items():
        labels = metric.labels if name == "openforge_dead_letters" else ("run", *metric.labels)
        yield f"| `{exported(name, metric.kind)}` | {', '.join(labels)} | {metric.help} |"
    for instrument in PROCESS:
        label = "name" if instrument.name == "openforge_says" else ""
        yield f"| `{exported(instrument.name, instrument.kind)}` (each service) | {label} | {instrument.help} |"


def exported(name: str, kind: str) -> str:
    """The name that Prometheus shows."""
    return f"{name}_total" if kind == "counter" else name


def main() -> int:
    differing = [path for path, text in documents().items() if not path.exists() or path.read_text() != text]
    if "--check" not in sys.argv:
        for path, text in documents().items():
            path.write_text(text)
        return 0
    for path in differing:
        print(f"{path} differs from the code: run `python -m openforge.cli.dashboard`", file=sys.stderr)
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main())

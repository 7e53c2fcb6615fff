"""Alerts and dashboard speak of numbers that are exported, by names and labels that those have."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from openforge.cli.dashboard import PANELS, documents, exported
from openforge.runs.metrics import METRICS
from openforge.service.metrics import PROCESS

ROOT = Path(__file__).parents[3]
RULES = yaml.safe_load((ROOT / "deploy/observability/alerts.yaml").read_text())["groups"][0]["rules"]
LABELS: dict[str, set[str]] = (
    {exported(name, metric.kind): {"run", *metric.labels} for name, metric in METRICS.items()}
    | {exported(each.name, each.kind): {"name", "instance", "job"} for each in PROCESS}
    | {"up": {"instance", "job"}}
)
_NUMBER = r"\b(?:openforge_\w+|up)\b"  # ours, and Prometheus's own of each that it asks


def faults(expression: str) -> Iterator[str]:
    """What Prometheus would find nothing for."""
    for name, matchers in re.findall(r"(\w+)\{([^}]*)\}", expression):
        for label in re.findall(r"(\w+)\s*[=!]~?", matchers):
            if label not in LABELS.get(name, ()):
                yield f"{name} has no label {label}"
    bare = re.sub(r'"[^"]*"|\{[^}]*\}|\[[^\]]*\]', "", expression)
    spoken_of = set(re.findall(_NUMBER, bare))
    yield from (f"{name} is not exported" for name in spoken_of - LABELS.keys())
    for labels in re.findall(r"\b(?:by|on|ignoring)\s*\(([^)]*)\)", bare):
        for label in re.split(r"\s*,\s*", labels):
            if not any(label in LABELS.get(name, ()) for name in spoken_of):
                yield f"nothing has a label {label}"


def test_the_check_finds_what_is_wrong() -> None:
    assert list(faults("openforge_running == 1")) == []
    assert list(faults("openforge_runing == 1")) == ["openforge_runing is not exported"]
    assert list(faults('openforge_running{stage="x"}')) == ["openforge_running has no label stage"]
    assert list(faults("sum by (stage) (openforge_running)")) == ["nothing has a label stage"]


def test_alerts_speak_of_numbers_that_there_are() -> None:
    assert {rule["alert"]: list(faults(rule["expr"])) for rule in RULES if list(faults(rule["expr"]))} == {}
    for rule in RULES:
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["remedy"]
        assert rule["labels"]["severity"] in ("critical", "warning")
        spoken_of = set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
        names = set(re.findall(_NUMBER, rule["expr"]))
        assert spoken_of <= set.union(*(LABELS[name] for name in names))


def test_panels_speak_of_numbers_that_there_are() -> None:
    shown = [expression for row in PANELS.values() for panel in row for expression in panel.shows]
    assert {expression: list(faults(expression)) for expression in shown if list(faults(expression))} == {}


def test_dashboard_and_docs_are_what_the_code_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert [str(path) for path, text in documents().items() if path.read_text() != text] == []

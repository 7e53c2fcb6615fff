"""Alerts and configuration as Prometheus itself reads them, and every alert as it fires and as it does not."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from needed import needs
from prometheus import PROMTOOL, ROOT, laid_out

from openforge.cli.dashboard import PANELS

RULES = ROOT / "deploy" / "observability" / "alerts.yaml"
WORLDS = Path(__file__).with_name("alerts.test.yaml")
ALERTS = {rule["alert"]: rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]}

pytestmark = needs(PROMTOOL)


def promtool(*arguments: str | Path) -> tuple[bool, str]:
    """Whether it is content, and what it said."""
    done = subprocess.run([PROMTOOL, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.returncode == 0, done.stdout


def worlds_of(alert: str) -> list[list[dict[str, Any]]]:
    """The checks of each world that looks at this alert."""
    found = ([check for check in world["alert_rule_test"] if check["alertname"] == alert] for world in worlds())
    return [checks for checks in found if checks]


def worlds() -> list[dict[str, Any]]:
    tests: list[dict[str, Any]] = yaml.safe_load(WORLDS.read_text())["tests"]
    return tests


def fires(check: dict[str, Any]) -> bool:
    return bool(check.get("exp_alerts"))


def test_the_rules_are_rules() -> None:
    content, said = promtool("check", "rules", RULES)
    assert content, said
    assert f"{len(ALERTS)} rules found" in said


def test_the_configuration_of_compose_is_one_beside_the_files_that_compose_shows_it(tmp_path: Path) -> None:
    content, said = promtool("check", "config", laid_out(tmp_path))
    assert content, said
    assert f"{len(ALERTS)} rules found" in said


def test_every_alert_fires_where_it_should_and_nowhere_else() -> None:
    content, said = promtool("test", "rules", WORLDS)
    assert content, said


@pytest.mark.parametrize("alert", ALERTS)
def test_no_alert_is_left_out(alert: str) -> None:
    loud = [checks for checks in worlds_of(alert) if any(map(fires, checks))]
    assert loud, "no world in which it fires"
    assert all(not fires(checks[0]) and fires(checks[-1]) for checks in loud), "it fires at once, whatever its time is"
    assert len(worlds_of(alert)) > len(loud), "no world in which it is silent"


@pytest.mark.parametrize(("expression", "told"), [("vector(0) > 1", "exp:[\n"), ("vector(1)", "exp:[], ")])
def test_the_worlds_find_alerts_that_never_fire_and_such_that_always_do(
    tmp_path: Path, expression: str, told: str
) -> None:
    broken = [{**rule, "expr": expression, "for": "0s"} for rule in ALERTS.values()]
    (tmp_path / "alerts.yaml").write_text(yaml.safe_dump({"groups": [{"name": "broken", "rules": broken}]}))
    tests = yaml.safe_load(WORLDS.read_text()) | {"rule_files": ["alerts.yaml"]}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(tests))
    content, said = promtool("test", "rules", tmp_path / "test.yaml")
    assert not content
    found = {part.partition(",")[0] for part in said.split("alertname: ")[1:] if told in part}
    assert found == ALERTS.keys()


def test_every_panel_asks_in_words_that_prometheus_knows(tmp_path: Path) -> None:
    asked = [expression for row in PANELS.values() for panel in row for expression in panel.shows]
    rules = [
        {"record": f"panel:{number}", "expr": expression.replace("$run", ".*")}
        for number, expression in enumerate(asked)
    ]
    (tmp_path / "panels.yaml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    content, said = promtool("check", "rules", tmp_path / "panels.yaml")
    assert content, said

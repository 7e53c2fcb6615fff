"""Which interpreter runs which service of a local run."""

import sys
from pathlib import Path

import pytest
from learner_world import run_config

from openforge.cli.local import interpreter


def test_a_learner_of_verl_runs_where_verl_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENFORGE_VERL_PYTHON", raising=False)
    verl, torch = run_config(tmp_path, learner={"backend": "verl"}), run_config(tmp_path)
    assert interpreter("learner", verl) == sys.executable
    own = tmp_path / ".venv-verl/bin/python"
    own.parent.mkdir(parents=True)
    own.touch()
    assert interpreter("learner", verl) == str(own)
    assert interpreter("engine", verl) == interpreter("learner", torch) == sys.executable
    monkeypatch.setenv("OPENFORGE_VERL_PYTHON", "/elsewhere/python")
    assert interpreter("learner", verl) == "/elsewhere/python"

"""Which interpreter runs which service of a local run."""

import sys
from pathlib import Path

import msgspec
import pytest
from learner_world import run_config

from openforge.cli.home import Home
from openforge.cli.local import Ports, address, interpreter, service_specs


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


def test_the_keys_of_a_bucket_reach_learner_and_engine_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENFORGE_RUNS", str(tmp_path))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    specs = service_specs(run_config(tmp_path), Home("r"), Ports(nats=1, engine=2, proxy=3))
    env = {spec.name: spec.env for spec in specs}
    assert {name for name, held in env.items() if "AWS_SECRET_ACCESS_KEY" in held} == {"learner", "engine"}
    assert {held["AWS_ENDPOINT_URL"] for held in env.values()} == {"http://127.0.0.1:1"}


def test_a_supervisor_that_is_gone_is_not_found_in_another_process_of_its_number(tmp_path: Path) -> None:
    home, told = Home("r", tmp_path), address(Ports(nats=1, engine=2, proxy=3))
    home.make()
    home.tell_address(told)
    assert home.address() == told
    home.tell_address(msgspec.structs.replace(told, started="1"))
    assert home.address() is None

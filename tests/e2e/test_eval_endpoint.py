"""`openforge eval` of a model that somebody else serves: real services and boxes, a chat server for the model."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from claw_agents import BOOKED, LOOKED, SAID
from pyarrow import parquet
from stub_chat import Reply, StubChat, stub_chat

ROOT = Path(__file__).parents[2]
CLAW = ROOT / "examples" / "claw-eval.toml"
KEY = "secret-of-the-endpoint"


def evaluate(runs: Path, *argv: str, env: Mapping[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "OPENFORGE_RUNS": str(runs), "PYTHONPATH": os.pathsep.join(sys.path), **(env or {})}
    command = [sys.executable, "-m", "openforge.cli", "eval", str(CLAW), "--plain", *argv]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=900)


def played(request: dict[str, Any]) -> Reply:
    """An agent that books the room in every trial, and a judge who likes everything."""
    said = request["messages"]
    if "judge" in said[0]["content"]:
        return '{"score": 1.0}'
    answers = sum(message["role"] == "tool" for message in said)
    status, body = (LOOKED, BOOKED)[answers] if answers < 2 else (200, _ended())
    return status, body | {"usage": {"prompt_tokens": 100, "completion_tokens": 7}}


def _ended() -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": SAID}, "finish_reason": "stop"}]}


def test_a_foreign_model_is_evaluated_like_a_policy_and_what_is_not_known_of_it_is_not_told(tmp_path: Path) -> None:
    with stub_chat(_once_overloaded(played)) as chat:
        chat.models = ["theirs-1"]
        done = evaluate(
            tmp_path,
            *("--endpoint", chat.base_url, "--model", "theirs-1", "--key-env", "THEIR_KEY"),
            *("--set", "environment.tasks=['O01_book_a_room']", "--set", "evaluation.heldout_episodes=1"),
            *("--set", "evaluation.trials=3", "--set", "engine.max_requests=2", "--set", "run.name=theirs"),
            env={"THEIR_KEY": KEY},
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        _asked_as_it_should(chat)
    said = msgspec.json.decode((tmp_path / "theirs-eval" / "eval.json").read_bytes())
    (result,) = said["harnesses"]
    assert said["model"] == f"theirs-1 at {chat.base_url}"
    assert (result["harness"], result["tasks"], result["trials"]) == ("react", 1, 3)
    assert {one["estimator"]: one["estimate"]["value"] for one in result["passes"]} == {
        "pass@1 (unbiased)": 1.0,
        "pass@3 (unbiased)": 1.0,
        "pass^3 (unbiased)": 1.0,
        "pass^3 (plug-in)": 1.0,
    }
    assert (result["sampled_tokens_mean"], result["turns_mean"]) == (21.0, 3.0)
    rows = parquet.read_table(tmp_path / "theirs-eval" / "trials.parquet").to_pylist()
    assert {(row["version"], row["passed"], row["sampled_tokens"]) for row in rows} == {(None, True, 21)}
    assert dict(rows[0]["metrics"])["env_tool_coverage"] == pytest.approx(2 / 3)
    summary = msgspec.json.decode((tmp_path / "theirs-eval-react" / "summary.json").read_bytes())
    assert (summary["ledger_closes"], summary["delivered_fraction"]) == (True, 0.0)
    _key_is_nowhere(tmp_path)


def _once_overloaded(answer: Callable[[dict[str, Any]], Reply]) -> Callable[[dict[str, Any]], Reply]:
    """The first call of all is refused for the moment."""
    first = [True]

    def answered(request: dict[str, Any]) -> Reply:
        if first.pop() if first else False:
            return 429, {"error": {"message": "slow down"}}
        return answer(request)

    return answered


def _asked_as_it_should(chat: StubChat) -> None:
    assert set(chat.keys) == {f"Bearer {KEY}"}
    assert len(chat.requests) == 3 * 3 + 1
    assert chat.most_at_once <= 2
    request = chat.requests[-1]
    assert (request["model"], request["temperature"]) == ("theirs-1", 0.7)
    assert [tool["function"]["name"] for tool in request["tools"]] == ["rooms_free", "rooms_book", "rooms_cancel"]
    assert len({request["seed"] for request in chat.requests}) == 3 * 3


def _key_is_nowhere(runs: Path) -> None:
    for file in runs.rglob("*"):
        if file.is_file():
            assert KEY.encode() not in file.read_bytes(), file

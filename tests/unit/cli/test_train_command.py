from pathlib import Path

import msgspec
import pytest
from stub_chat import stub_chat
from typer.testing import CliRunner

from openforge.cli.conduct import Outcome
from openforge.cli.main import app
from openforge.cli.train import say_end
from openforge.protos import StopReason
from openforge.runs import load_run_file
from openforge.runs.progress import Evaluation, Progress
from openforge.runs.summary import Summary

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.toml"))


@pytest.mark.parametrize("run_file", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_passes_a_dry_run_also_without_its_model(run_file: Path) -> None:
    result = CliRunner().invoke(app, ["train", str(run_file), "--dry-run"])
    assert result.exit_code == 0, result.output
    assert "steps of" in result.output


@pytest.mark.parametrize(
    ("store", "said"),
    [
        ("", "published in the learner's own folder, which engines have to see"),
        ("/mnt/weights", "published in /mnt/weights, which engines have to see"),
        ("s3://bucket/p", "published at s3://bucket/p, the 3 newest kept; credentials by the AWS variables"),
        ("nats", "published in the bus's object store of_weights"),
    ],
)
def test_a_dry_run_says_where_weights_are_published(store: str, said: str) -> None:
    tiny = next(path for path in EXAMPLES if path.stem == "tiny")
    result = CliRunner().invoke(app, ["train", str(tiny), "--dry-run", "--set", f"weights.store={store}"])
    assert result.exit_code == 0, result.output
    assert said in result.output


def test_the_end_of_a_run_shows_no_success_that_nobody_measured(capsys: pytest.CaptureFixture[str]) -> None:
    config = load_run_file(next(path for path in EXAMPLES if path.stem == "tiny"))
    progress = Progress()
    progress.evaluations[0] = Evaluation(rewards=[1.0, 0.0])
    of_other_types = {"ledger_closes": True, "breaks": {}, "dropped_tokens": {}}
    numbers = msgspec.convert({**dict.fromkeys(Summary.__struct_fields__, 0), **of_other_types}, Summary)
    say_end(config, Outcome(reason=StopReason.INTERRUPTED, detail="", progress=progress, summary=numbers))
    shown = capsys.readouterr().out
    assert "success_heldout_before" in shown
    assert "success_heldout_after" not in shown


def test_a_run_without_its_model_is_refused_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENFORGE_RUNS", str(tmp_path))
    tiny = next(path for path in EXAMPLES if path.stem == "tiny")
    result = CliRunner().invoke(app, ["train", str(tiny), "--set", "model.path=builtin:nothing"])
    assert result.exit_code == 2
    assert "choose one of smollm2-135m, tiny" in result.output


@pytest.mark.parametrize("command", [("train", "--plain"), ("up",)], ids=lambda command: command[0])
@pytest.mark.parametrize(
    ("key_env", "said"),
    [
        ("NO_SUCH_KEY", "judge.key_env = 'NO_SUCH_KEY': no such environment variable is set"),
        ("JUDGE_KEY", "judge.key_env = 'JUDGE_KEY': the endpoint refuses that key (HTTP 401)"),
    ],
)
def test_a_judge_that_cannot_be_asked_is_told_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key_env: str, said: str, command: tuple[str, ...]
) -> None:
    monkeypatch.setenv("OPENFORGE_RUNS", str(tmp_path))
    monkeypatch.setenv("JUDGE_KEY", "wrong")
    tiny = next(path for path in EXAMPLES if path.stem == "tiny")
    with stub_chat(lambda _: (401, {"error": {"message": "no"}})) as chat:
        judge = {"url": chat.base_url, "model": "m", "key_env": key_env}
        overrides = [word for name, value in judge.items() for word in ("--set", f"judge.{name}={value}")]
        result = CliRunner().invoke(app, [*command, str(tiny), *overrides])
    assert result.exit_code == 2, result.output
    assert said in result.output
    assert result.output.startswith("openforge: ")
    assert not list(tmp_path.glob("*/nats"))

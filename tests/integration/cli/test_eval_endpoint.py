"""`openforge eval` and an endpoint that cannot be used: told in one sentence, before anything starts."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import Result
from stub_chat import stub_chat
from typer.testing import CliRunner

from openforge.cli.main import app

CLAW = Path(__file__).parents[3] / "examples" / "claw-eval.toml"
KEY = "secret-of-the-endpoint"


@pytest.fixture(autouse=True)
def _environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENFORGE_RUNS", str(tmp_path))
    monkeypatch.setenv("THEIR_KEY", KEY)


def evaluate(argv: Sequence[str]) -> Result:
    return CliRunner().invoke(app, ["eval", str(CLAW), "--plain", *argv])


@pytest.mark.parametrize(
    ("argv", "status", "said"),
    [
        (("--model", "m"), 200, "--model and --key-env belong to --endpoint"),
        (("--endpoint", "URL", "--model", "m", "--key-env", "NO_SUCH"), 200, "no such environment variable is set"),
        (("--endpoint", "URL", "--model", "m"), 401, "engine.key_env = '': the endpoint wants a key (HTTP 401)"),
        (("--endpoint", "URL", "--model", "m", "--key-env", "THEIR_KEY"), 403, "refuses that key (HTTP 403)"),
        (("--endpoint", "URL", "--model", "m"), 404, "engine.model = 'm': the endpoint answers 404 to it"),
        (
            ("--endpoint", "http://127.0.0.1:9/v1", "--model", "m"),
            200,
            "engine.url = 'http://127.0.0.1:9/v1': it cannot",
        ),
        (("--endpoint", "URL"), 200, "--endpoint without --model: name the model"),
        (("--endpoint", "URL", "--model", "m", "--version", "r@1"), 200, "with an endpoint: it serves its own model"),
    ],
)
def test_an_endpoint_that_cannot_be_used_is_told_before_anything_starts(
    tmp_path: Path, argv: tuple[str, ...], status: int, said: str
) -> None:
    with stub_chat(lambda _: (status, {"error": {"message": "no"}})) as chat:
        named = [chat.base_url if word == "URL" else word for word in argv]
        done = evaluate(named)
    assert done.exit_code == 2, done.output
    assert said in done.stderr
    assert KEY not in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_model_that_is_not_listed_is_answered_with_those_that_are() -> None:
    with stub_chat(lambda _: "hi") as chat:
        chat.models = ["small", "large"]
        done = evaluate(["--endpoint", chat.base_url, "--model", "huge"])
    assert done.exit_code == 2
    assert "engine.model = 'huge': the endpoint does not list it: it has small, large" in done.stderr
    assert not chat.requests


def test_the_help_says_what_an_endpoint_takes_the_place_of() -> None:
    done = CliRunner().invoke(app, ["eval", "--help"])
    assert "takes the place of the section `engine`" in " ".join(done.stdout.split())

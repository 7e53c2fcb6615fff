from pathlib import Path

import pytest
from typer.testing import CliRunner

from openforge.cli.main import app

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.toml"))


@pytest.mark.parametrize("run_file", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_passes_a_dry_run_also_without_its_model(run_file: Path) -> None:
    result = CliRunner().invoke(app, ["train", str(run_file), "--dry-run"])
    assert result.exit_code == 0, result.output
    assert "steps of" in result.output


def test_a_run_without_its_model_is_refused_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENFORGE_RUNS", str(tmp_path))
    tiny = next(path for path in EXAMPLES if path.stem == "tiny")
    result = CliRunner().invoke(app, ["train", str(tiny), "--set", "model.path=builtin:nothing"])
    assert result.exit_code == 2
    assert "choose one of smollm2-135m, tiny" in result.output

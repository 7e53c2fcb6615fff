"""Raw parquet becomes rollout parquet by the command, and that file's tasks are proved in real boxes."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from typer.testing import CliRunner

from openforge.cli.main import app
from openforge.env.check import check_environment
from openforge.env.registry import load_environment
from openforge.env.rollouts import load_rollout_tasks
from openforge.env.task_file import BadTask
from openforge.sandbox.process import ProcessDriver

EXAMPLES = Path(__file__).parents[3] / "examples"
CHECK = 'if [ "$(cat /workspace/out.txt)" = %s ]; then echo \'{"reward": 1}\'; else echo \'{"reward": 0}\'; fi\n'
ENV = """
from pathlib import Path

from openforge.env.rollouts import load_rollout_tasks

HARNESSES = {"agent": "command"}


def tasks():
    return load_rollout_tasks(Path(__file__).parent / "rollouts.parquet")


def create_command(**_):
    raise NotImplementedError
"""


def row(word: str, split: str) -> dict[str, Any]:
    return {
        "task_id": f"write-{word}",
        "domain": "write",
        "split": split,
        "prompt": [{"role": "user", "content": f"Write {word} into out.txt."}],
        "task": json.dumps({"workspace": {"a.txt": "x"}, "reference": f"echo {word} > out.txt"}),
        "verifier": json.dumps({"command": ["/bin/sh", "/tests/check.sh"], "tests": {"check.sh": CHECK % word}}),
        "difficulty": 0.5,
    }


ROWS = [row("fir", "train"), row("oak", "train"), row("yew", "heldout"), row("box", "heldout")]


def convert(folder: Path, rows: list[dict[str, Any]]) -> Any:
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "raw.parquet")
    out = folder / "rollouts.parquet"
    arguments = [
        "env",
        "rollouts",
        str(folder / "raw.parquet"),
        "--run",
        str(EXAMPLES / "demo.toml"),
        "--out",
        str(out),
    ]
    return CliRunner().invoke(app, arguments)


def test_rows_keep_what_they_had_and_gain_how_they_are_run(tmp_path: Path) -> None:
    assert convert(tmp_path, ROWS).exit_code == 0
    first, second = (parquet.read_table(tmp_path / "rollouts.parquet").to_pylist() for _ in range(2))
    assert first == second
    assert [one["difficulty"] for one in first] == [0.5] * 4
    assert first[0]["harness"] == "mini-swe-agent"
    assert first[0]["env_class"] == "pipeline"
    assert "api_key" not in first[0]["llm_args"]


def test_training_and_evaluation_draw_from_their_own_rows(tmp_path: Path) -> None:
    convert(tmp_path, ROWS)
    (task,) = load_rollout_tasks(tmp_path / "rollouts.parquet")
    assert {task.draw(2 * n, "train").instruction for n in range(8)} == {
        "Write fir into out.txt.",
        "Write oak into out.txt.",
    }
    assert {task.draw(2 * n + 1, "heldout").reference for n in range(8)} == {"echo yew > out.txt", "echo box > out.txt"}


async def test_the_tasks_of_a_file_pass_their_check(tmp_path: Path) -> None:
    convert(tmp_path, ROWS)
    (tmp_path / "env.py").write_text(ENV)
    driver = ProcessDriver(tmp_path / "boxes", proxy_socket=None, owner="test", allow_reduced=True)
    reports = await check_environment(driver, load_environment(str(tmp_path / "env.py")), [], seeds=[0])
    await driver.close()
    assert [(report.task, report.problems) for report in reports] == [("write", ())]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"split": "test"}, "row 0: split = 'test': use train or heldout"),
        ({"verifier": "{}"}, "row 0: verifier cannot be read"),
        ({"domain": "a b"}, "row 0: domain = 'a b'"),
        ({"note": 'judge {"api_key": "abc"}'}, "row 0: note holds what looks like a key"),
        ({"task_id": "write-oak"}, "has task_id 'write-oak' twice"),
    ],
)
def test_a_row_that_cannot_be_a_task_refuses_the_file(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    refused = convert(tmp_path, [row("fir", "train") | changes, row("oak", "train")])
    assert refused.exit_code == 2
    assert said in refused.output
    assert not (tmp_path / "rollouts.parquet").exists()


def test_a_changed_row_is_not_what_its_digest_says(tmp_path: Path) -> None:
    convert(tmp_path, ROWS)
    rows = parquet.read_table(tmp_path / "rollouts.parquet").to_pylist()
    rows[1]["prompt"] = [{"role": "user", "content": "Do nothing."}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rollouts.parquet")
    with pytest.raises(BadTask, match="is not what its task_digest says"):
        load_rollout_tasks(tmp_path / "rollouts.parquet")

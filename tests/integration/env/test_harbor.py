"""Harbor's task folders, written for the test, proved in real boxes."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from openforge.env.check import check_task
from openforge.env.harbor import HarborTask, load_harbor_tasks
from openforge.env.task_file import BadTask
from openforge.env.verdict import Scored
from openforge.env.verify import Checker, Work
from openforge.sandbox.process import ProcessDriver

FILES = {
    "task.toml": """
schema_version = "1.4"
[task]
name = "openforge/total"
keywords = ["files"]
[agent]
timeout_sec = 60.0
[verifier]
timeout_sec = 20.0
[environment]
cpus = 1
memory_mb = 256
storage_mb = 32
""",
    "instruction.md": "Add the numbers of /app/data/numbers.txt and write the sum to /app/total.txt.\n",
    "environment/Dockerfile": 'FROM debian:12\nWORKDIR /app\nCOPY data/ ./data/\nCOPY note.txt .\nCMD ["bash"]\n',
    "environment/data/numbers.txt": "3\n4\n5\n",
    "environment/note.txt": "the sum lies in /app\n",
    "solution/solve.sh": "#!/bin/bash\nawk '{s += $1} END {print s}' /app/data/numbers.txt > /app/total.txt\n",
    "tests/test.sh": """#!/bin/bash
cd /app
if [ "$(cat total.txt)" = "$(cat /tests/expected)" ]; then echo 1 > /logs/verifier/reward.txt
else echo 0 > /logs/verifier/reward.txt; fi
""",
    "tests/expected": "12\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        file = tmp_path / "tasks" / "total" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path / "tasks"


@pytest.fixture
async def checker(tmp_path: Path) -> AsyncIterator[Checker]:
    driver = ProcessDriver(tmp_path / "boxes", proxy_socket=None, owner="test", allow_reduced=True)
    yield Checker(driver, tmp_path)
    await driver.close()


def _write(folder: Path, name: str, text: str) -> None:
    (folder / "total" / name).write_text(text)


def test_a_folder_becomes_a_task_in_the_workspace(folder: Path) -> None:
    (task,) = load_harbor_tasks(folder)
    drawn = task.draw(5, "heldout")
    assert (
        drawn.instruction == "Add the numbers of /workspace/data/numbers.txt and write the sum to /workspace/total.txt."
    )
    assert set(drawn.workspace) == {"data/numbers.txt", "note.txt"}
    assert drawn.workspace["note.txt"].content == b"the sum lies in /workspace\n"
    assert (drawn.limits.memory_mb, drawn.verify_timeout_s, drawn.tags) == (256, 20.0, ("files",))


async def test_the_reference_passes_and_neither_idleness_nor_tricks_do(folder: Path, checker: Checker) -> None:
    (task,) = load_harbor_tasks(folder)
    assert (await check_task(checker.driver, task, [0, 1])).problems == ()


async def test_a_check_that_believes_the_work_is_found_out(folder: Path, checker: Checker) -> None:
    _write(folder, "tests/test.sh", "cp /app/reward.txt /logs/verifier/ || echo 0 > /logs/verifier/reward.txt\n")
    _write(folder, "solution/solve.sh", "echo 1 > /app/reward.txt\n")
    (task,) = load_harbor_tasks(folder)
    problems = (await check_task(checker.driver, task, [0])).problems
    assert [problem for problem in problems if "planted files earn 1" in problem]


@pytest.mark.parametrize(
    ("written", "score"),
    [
        ("echo 0 > reward.txt; echo '{\"reward\": 0.5}' > reward.json", 0.5),
        ("echo '{\"accuracy\": 0.25}' > reward.json", 0.25),
        ('echo \'{"reward": 1.0, "speed": 3}\' > reward.json', 1.0),
        ("echo nan > reward.txt", None),
        ("true", None),
        ('echo \'{"a": 1, "b": 2}\' > reward.json', None),
        ("echo 1 > reward.txt; exit 3", 1.0),
    ],
)
async def test_reward_files_are_read_as_harbor_reads_them(
    folder: Path, checker: Checker, written: str, score: float | None
) -> None:
    _write(folder, "tests/test.sh", f"cd /logs/verifier\n{written}\n")
    outcome = await checker.score(HarborTask(folder / "total").draw(0, "train"), Work(), name="h")
    assert (outcome.metrics["score"] if isinstance(outcome, Scored) else None) == score


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "environment/Dockerfile",
            "FROM debian\nRUN apt-get install -y jq\n",
            "'RUN apt-get install -y jq' needs an image",
        ),
        ("environment/Dockerfile", "FROM debian\nCOPY data /etc/data\n", "copy files of environment/ into /app"),
        ("environment/Dockerfile", "FROM debian\nCOPY nothing .\n", "there is no nothing in environment/"),
        ("task.toml", "[[steps]]\nname = 'one'\n", "a task of several steps cannot be kept here"),
        ("task.toml", "artifacts = ['/var/log']\n", "artifacts has '/var/log'"),
        ("task.toml", "= 3", "is no TOML file"),
        ("solution/more.py", "", "only solution/solve.sh is run here"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_the_way_out(folder: Path, name: str, text: str, said: str) -> None:
    _write(folder, name, text)
    with pytest.raises(BadTask, match=said):
        load_harbor_tasks(folder)

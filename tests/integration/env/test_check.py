"""Tasks are proved in real boxes."""

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from openforge.env.check import check_environment, check_task, main
from openforge.env.layout import load_task
from openforge.env.new import CannotCreate, new_environment
from openforge.env.registry import load_environment
from openforge.env.task_file import read_words
from openforge.sandbox.process import ProcessDriver


@pytest.fixture
async def driver(tmp_path: Path) -> AsyncIterator[ProcessDriver]:
    driver = ProcessDriver(tmp_path / "boxes", proxy_socket=None, owner="test", allow_reduced=True)
    yield driver
    await driver.close()


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    return new_environment("mine", tmp_path)


async def test_a_new_environment_passes_its_check(driver: ProcessDriver, environment: Path) -> None:
    reports = await check_environment(driver, load_environment(str(environment)), [], seeds=range(2))
    assert [(report.task, report.problems) for report in reports] == [("count", ()), ("rename", ())]
    assert all(report.instances == 4 for report in reports)


def test_a_new_environment_overwrites_nothing(environment: Path) -> None:
    with pytest.raises(CannotCreate, match="is already there"):
        new_environment("mine", environment.parent)
    with pytest.raises(CannotCreate, match="use a lower-case letter"):
        new_environment("../mine", environment.parent)
    assert "The environment `mine`" in (environment / "env.py").read_text()


def _edit(environment: Path, file: str, old: str, new: str) -> None:
    path = environment / "tasks/rename" / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


async def _problems(driver: ProcessDriver, environment: Path) -> str:
    tasks = environment / "tasks"
    task = load_task(tasks / "rename", read_words(tasks / "words.yaml"))
    return "\n".join((await check_task(driver, task, seeds=[0])).problems)


@pytest.mark.parametrize(
    ("file", "old", "new", "problem"),
    [
        ("solution/solve.sh", "mv", "cp", "the reference earns 0, which is less than pass_threshold 1"),
        ("solution/solve.sh", "mv", "no-such", "the reference fails: the script ended with exit code 127"),
        ("tests/check.sh", '{"reward": 0}', '{"reward": 1}', "no work at all earns 1, which is more than reward.floor"),
        (
            "tests/check.sh",
            '{"reward": 0}',
            "bad",
            "on no work at all the last line that the checks printed",
        ),
        ("tests/check.sh", "echo", "exit 3; echo", "on the reference the checks ended with exit code 3"),
        ("tests/check.sh", """'{"reward": 1}'""", '"{\\"reward\\": 1, \\"at\\": 1$(date +%N)}"', "judged differently"),
        ("task.yaml", "verifier:\n  command: [/bin/sh, /tests/check.sh]\n", "", "it has no checks"),
    ],
)
async def test_what_is_wrong_with_a_task_is_said_in_a_sentence(
    driver: ProcessDriver, environment: Path, file: str, old: str, new: str, problem: str
) -> None:
    _edit(environment, file, old, new)
    assert problem in await _problems(driver, environment)


async def test_heldout_instances_that_training_sees_are_a_problem(driver: ProcessDriver, environment: Path) -> None:
    for file in ("tests/check.sh", "solution/solve.sh", "task.yaml", "environment/{{old}}.txt"):
        path = environment / "tasks/rename" / file
        path.write_text(path.read_text().replace("{{old}}", "a").replace("{{new}}", "b").replace("{{text}}", "c"))
    path.rename(path.with_name("a.txt"))
    assert "a held-out instance is also a training instance" in await _problems(driver, environment)


def test_the_command_says_what_it_proved(environment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(environment), "--seeds", "1", "--tasks", "rename"]) == 0
    assert "ok   rename  2 instances" in capsys.readouterr().out


def test_an_environment_that_does_not_exist_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nowhere"]) == 2
    assert "'nowhere' is not installed" in capsys.readouterr().err


def test_a_draw_that_depends_on_the_process_is_seen(environment: Path) -> None:
    draw = "def draw(rng, split):\n    return {'mood': next(iter(set('abcdefgh')))}\n"
    (environment / "tasks/rename/template.py").write_text(draw)
    _edit(environment, "task.yaml", "{{new}}.txt.", "{{new}}.txt, {{mood}}.")
    assert len({_digests(environment, hash_seed) for hash_seed in range(5)}) > 1


def _digests(environment: Path, hash_seed: int) -> str:
    env = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": os.pathsep.join(sys.path)}
    argv = [sys.executable, "-m", "openforge.env.check", str(environment), "--digests", "--seeds", "1"]
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout

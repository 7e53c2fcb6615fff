"""Every kind of shell task: the reference does it, nothing else does, and the two splits share no name."""

import json
import runpy
import subprocess
from pathlib import Path

import pytest

from openforge.env.contract import TaskFile, TaskInstance, TaskTemplate
from openforge_envs.shell.env import tasks
from openforge_envs.shell.instances import ShellTask
from openforge_envs.shell.words import words

KINDS = {task.id: task for task in tasks()}
SEEDS = range(2)


def lay(files: dict[str, TaskFile], folder: Path) -> None:
    for name, file in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.content)
        path.chmod(file.mode)


def laid(instance: TaskInstance, folder: Path) -> Path:
    (folder / "workspace").mkdir(parents=True)
    lay(dict(instance.workspace), folder / "workspace")
    lay(dict(instance.tests), folder / "tests")
    return folder / "workspace"


def work(command: str, workspace: Path) -> None:
    subprocess.run(["bash", "-e", "-c", command], cwd=workspace, check=True)


def difference(workspace: Path) -> str:
    """What the check says, run in this process since there are hundreds of them."""
    check = runpy.run_path(str(workspace.parent / "tests" / "check.py"))
    return str(check["first_difference"](str(workspace)))


def passes(workspace: Path) -> bool:
    return difference(workspace) == ""


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_passes_and_idleness_earns_nothing(kind: str, tmp_path: Path) -> None:
    for split in ("train", "heldout"):
        for seed in SEEDS:
            workspace = laid(KINDS[kind].draw(seed, split), tmp_path / f"{split}-{seed}")
            assert not passes(workspace), "an idle agent is paid"
            work(KINDS[kind].draw(seed, split).reference, workspace)
            assert difference(workspace) == ""


@pytest.mark.parametrize("kind", KINDS)
def test_one_stray_file_spoils_the_work(kind: str, tmp_path: Path) -> None:
    instance = KINDS[kind].draw(0, "train")
    workspace = laid(instance, tmp_path)
    work(instance.reference + "\ntouch stray", workspace)
    assert difference(workspace) == "stray should not be there"


def test_the_verdict_is_the_last_line_of_a_command_of_its_own(tmp_path: Path) -> None:
    instance = KINDS["delete"].draw(0, "train")
    workspace = laid(instance, tmp_path)
    command = [part.replace("/tests/", f"{tmp_path}/tests/") for part in instance.verify]
    out = subprocess.run([*command, workspace], check=True, stdout=subprocess.PIPE, text=True).stdout
    assert json.loads(out.splitlines()[-1])["reward"] == 0
    work(instance.reference, workspace)
    out = subprocess.run([*command, workspace], check=True, stdout=subprocess.PIPE, text=True).stdout
    assert json.loads(out.splitlines()[-1]) == {"reward": 1, "difference": ""}


def test_there_are_ten_kinds_with_a_foothold_and_many_without() -> None:
    with_foothold = [kind for kind, task in KINDS.items() if isinstance(task, ShellTask) and "foothold" in task.tags]
    assert len(with_foothold) == 10
    assert len(KINDS) >= 22


def test_a_seed_gives_the_same_instance_and_other_seeds_others() -> None:
    for task in KINDS.values():
        assert task.draw(7, "train").digest == task.draw(7, "train").digest
        assert len({task.draw(seed, "train").digest for seed in range(20)}) == 20


def test_training_and_heldout_instances_share_no_word_of_the_lists() -> None:
    assert len(words("train")) == 50
    assert len(words("heldout")) == 28
    for task in KINDS.values():
        for seed in range(20):
            assert not words_in(task, seed, "train") & set(words("heldout"))
            assert not words_in(task, seed, "heldout") & set(words("train"))


def words_in(task: TaskTemplate, seed: int, split: str) -> set[str]:
    instance = task.draw(seed, "train" if split == "train" else "heldout")
    text = f"{instance.instruction} {' '.join(instance.workspace)}"
    return {word for word in (*words("train"), *words("heldout")) if word in text}


def test_no_word_hides_in_another() -> None:
    every = (*words("train"), *words("heldout"))
    assert not [(one, other) for one in every for other in every if one != other and one in other]


@pytest.mark.parametrize(
    "spoil",
    [
        "echo more >> {file}",
        "chmod +x {file}",
        "mv {file} other",
        "rm {file} && mkdir {file}",
        "ln -sf /etc/hosts {file}",
    ],
)
def test_a_bystander_must_stay_as_it_is(spoil: str, tmp_path: Path) -> None:
    instance = KINDS["touch"].draw(1, "train")
    workspace = laid(instance, tmp_path)
    work(instance.reference + "\n" + spoil.format(file=sorted(instance.workspace)[0]), workspace)
    assert not passes(workspace)


def test_a_newline_at_the_very_end_does_not_matter(tmp_path: Path) -> None:
    instance = KINDS["write_word"].draw(1, "train")
    workspace = laid(instance, tmp_path)
    work(instance.reference.replace("echo", "printf %s"), workspace)
    assert passes(workspace)


def test_a_corrected_script_may_quote_differently_but_not_do_something_else(tmp_path: Path) -> None:
    instance = KINDS["fix_script"].draw(1, "train")
    workspace = laid(instance, tmp_path)
    (script,) = (name for name in instance.workspace if name.endswith(".sh"))
    word = (workspace / script).read_text().split()[-1]
    (workspace / script).write_text(f'#!/bin/sh\necho "{word}"\n')
    assert passes(workspace)
    (workspace / script).write_text('#!/bin/sh\necho "unfinished\n')
    assert not passes(workspace)

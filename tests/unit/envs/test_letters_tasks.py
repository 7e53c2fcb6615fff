"""The letters environment: what earns how much."""

import json
import runpy
import subprocess
from pathlib import Path

import pytest

from openforge.env.contract import TaskInstance
from openforge_envs.letters.env import tasks

KINDS = {task.id: task for task in tasks()}


def share(instance: TaskInstance, answer: bytes | None, folder: Path) -> float:
    (folder / "check.py").write_bytes(instance.tests["check.py"].content)
    check = runpy.run_path(str(folder / "check.py"))
    assert answer is not None
    return float(check["share"](answer, instance.verify[-1]))


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_earns_everything_and_idleness_nothing(kind: str, tmp_path: Path) -> None:
    instance = KINDS[kind].draw(0, "heldout")
    (tmp_path / "check.py").write_bytes(instance.tests["check.py"].content)
    command = [part.replace("/tests", str(tmp_path)) for part in instance.verify]
    answer = tmp_path / "answer.txt"

    def reward() -> float:
        out = subprocess.run([*command, answer], check=True, stdout=subprocess.PIPE, text=True).stdout
        return float(json.loads(out)["reward"])

    assert reward() == 0.0
    subprocess.run(["sh", "-c", instance.reference], cwd=tmp_path, check=True)
    assert reward() == 1.0


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"", 0.0),
        (b"abcdefgh", 0.5),
        (b"a" * 40, 1.0),
        (b"\xff\xfe\xe2\x82" * 4, 0.0),
        (b"abcd\xff\xff\xff\xff" * 2, 0.5),
        ("ä".encode() * 16, 0.0),
        ("a�".encode() * 8, 0.5),
    ],
)
def test_only_the_first_sixteen_characters_of_the_class_count(answer: bytes, expected: float, tmp_path: Path) -> None:
    assert share(KINDS["letters"].draw(0, "train"), answer, tmp_path) == expected


def test_chance_is_low_but_not_nothing(tmp_path: Path) -> None:
    every_byte = [bytes([byte]) * 16 for byte in range(256)]
    for kind, low, high in (("letters", 0.19, 0.21), ("capitals", 0.24, 0.26), ("printable", 0.36, 0.38)):
        instance = KINDS[kind].draw(0, "train")
        chance = sum(share(instance, answer, tmp_path) for answer in every_byte) / 256
        assert low < chance < high


def test_heldout_instances_are_worded_differently() -> None:
    for task in KINDS.values():
        seen = {task.draw(seed, "train").instruction for seed in range(100)}
        assert len(seen) == 4
        assert not seen & {task.draw(seed, "heldout").instruction for seed in range(100)}

"""Which checkpoints stay, which are passed over, and which are refused."""

from pathlib import Path

import msgspec
import pytest

from openforge.learner.checkpoints import MEMORY, Checkpoints, ForeignCheckpoint, Memory, best_first


def memory(version: int, *rewards: float) -> Memory:
    return Memory(version=version, config_digest="d", batcher=b"fold", cursors={"policy": version}, rewards=rewards)


def saved(checkpoints: Checkpoints, version: int, *rewards: float) -> Path:
    return checkpoints.save(memory(version, *rewards), lambda folder: write(folder / "weights", version))


def write(path: Path, version: int) -> None:
    path.write_bytes(b"w" * version)


def versions(checkpoints: Checkpoints) -> list[int]:
    return [checkpoint.version for checkpoint in checkpoints.newest_first()]


def test_the_newest_stay_and_the_best(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2, keep_best=1)
    for version, reward in enumerate([0.2, 0.9, 0.4, 0.5, 0.1, 0.3], start=1):
        saved(checkpoints, version, reward, reward)
    assert versions(checkpoints) == [6, 5, 2]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["c000002", "c000005", "c000006"]


def test_of_equally_good_ones_the_newest_is_the_best(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1, keep_best=1)
    for version in (1, 2, 3):
        saved(checkpoints, version, 1.0 if version < 3 else 0.0)
    assert versions(checkpoints) == [3, 2]


def test_the_newest_alone_stay_where_that_is_asked(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2, keep_best=0)
    for version, reward in enumerate([0.9, 0.1, 0.1], start=1):
        saved(checkpoints, version, reward)
    assert versions(checkpoints) == [3, 2]


def test_what_lost_bytes_is_passed_over(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=3)
    for version in (1, 2, 3):
        saved(checkpoints, version)
    (tmp_path / "c000003/state/weights").write_bytes(b"w")
    (tmp_path / "c000002" / MEMORY).write_bytes(b"{")
    assert versions(checkpoints) == [1]


def test_a_crash_leaves_drafts_that_the_next_start_removes(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)

    def fail(folder: Path) -> None:
        write(folder / "weights", 1)
        raise RuntimeError("the machine is gone")

    with pytest.raises(RuntimeError):
        checkpoints.save(memory(1), fail)
    assert versions(checkpoints) == []
    assert list(tmp_path.iterdir()) != []
    checkpoints.tidy()
    assert list(tmp_path.iterdir()) == []


def test_what_an_older_release_wrote_is_read_and_is_never_the_best(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2, keep_best=1)
    folder = saved(checkpoints, 1)
    said = msgspec.json.decode((folder / MEMORY).read_bytes())
    older = {name: value for name, value in said.items() if name not in ("config", "rewards")}
    (folder / MEMORY).write_bytes(msgspec.json.encode(older))
    (found,) = checkpoints.newest_first()
    assert (found.memory.cursors, found.memory.config, found.reward) == ({"policy": 1}, "", None)
    assert best_first([found]) == []
    for version in (2, 3, 4):
        saved(checkpoints, version, 0.5)
    assert versions(checkpoints) == [4, 3]


def test_another_format_is_refused_with_the_folder_and_both_ways_out(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    saved(checkpoints, 1)
    folder = saved(checkpoints, 2)
    said = msgspec.json.decode((folder / MEMORY).read_bytes())
    (folder / MEMORY).write_bytes(msgspec.json.encode(said | {"schema": 2, "batcher": ["another", "shape"]}))
    with pytest.raises(ForeignCheckpoint, match=r"c000002 has format 2.*reads format 1.*move the folder away"):
        list(checkpoints.newest_first())

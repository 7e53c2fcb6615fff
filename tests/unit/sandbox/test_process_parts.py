"""The parts of the driver `process` that need no sandbox."""

import asyncio
import io
import os
import tarfile
from pathlib import Path

import pytest

from openforge.sandbox.archive import entries_of_tar, tar_of_entries
from openforge.sandbox.contract import PathRefused
from openforge.sandbox.inside.frames import fields_of, frame
from openforge.sandbox.process.launcher import Stage
from openforge.sandbox.process.pipes import Drain, Feed
from openforge.sandbox.process.records import Owner, Record, Records
from openforge.sandbox.process.seccomp import filter_program
from openforge.sandbox.process.uids import UserBlock


def test_frames_hold_any_bytes() -> None:
    fields = [b"", b"\0\xff" * 1000, b"x"]
    assert fields_of(frame(*fields)[4:]) == fields


def test_a_torn_frame_is_no_crash() -> None:
    for cut in range(12):
        fields_of(frame(b"abc", b"de")[4:][:cut])


def packed(*entries: bytes) -> bytes:
    return b"".join(entries) + frame(b"end")


@pytest.mark.parametrize("path", [b"/etc/passwd", b"/workspace-not", b"/workspace/../etc/x", b"workspace/x"])
def test_an_entry_that_nobody_asked_for_is_refused(path: bytes) -> None:
    with pytest.raises(PathRefused):
        tar_of_entries(packed(frame(b"file", path, b"420", b""), frame()), ["/workspace"])


def test_an_archive_that_ends_early_is_refused() -> None:
    with pytest.raises(PathRefused):
        tar_of_entries(frame(b"folder", b"/workspace", b"493", b""), ["/workspace"])


def test_names_in_a_tar_are_the_paths_without_their_slash() -> None:
    entries = [frame(b"folder", b"/workspace", b"493", b""), frame(b"file", b"/workspace/a\xff", b"420", b"")]
    tar = tar_of_entries(packed(*entries, frame(b"one"), frame(b"two"), frame()), ["/workspace"])
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        assert archive.getnames() == ["workspace", "workspace/a\udcff"]
    assert b"onetwo" in entries_of_tar(tar)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_every_jump_of_the_filter_lands_within_it(machine: str) -> None:
    program = filter_program(machine)
    assert program is not None
    steps = [program[at : at + 8] for at in range(0, len(program), 8)]
    assert len(steps) < 4096
    for number, step in enumerate(steps):
        if step[0] & 0x07 == 0x05:
            assert number + 1 + max(step[2], step[3]) < len(steps)


def test_an_unknown_machine_has_no_filter() -> None:
    assert filter_program("pdp11") is None


def test_two_drivers_never_share_a_user(tmp_path: Path) -> None:
    first, second = UserBlock(tmp_path), UserBlock(tmp_path)
    assert {first.take() for _ in range(50)}.isdisjoint({second.take() for _ in range(50)})
    first.close()
    third = UserBlock(tmp_path)
    assert third.take() // 1000 == 70
    for block in (second, third):
        block.close()


def test_the_user_that_rested_longest_is_next(tmp_path: Path) -> None:
    block = UserBlock(tmp_path)
    first = block.take()
    block.give_back(first)
    assert block.take() != first
    block.close()


def test_only_records_of_dead_owners_are_orphans(tmp_path: Path) -> None:
    records = Records(tmp_path)
    dead = Owner(pid=os.getpid(), started="1")  # the number was given to somebody else since
    records.write(Record(id="a", name="a", owner=records.me, labels={"run": "r"}, uid=1))
    records.write(Record(id="b", name="b", owner=dead, labels={"run": "r"}, uid=2))
    records.write(Record(id="c", name="c", owner=dead, labels={"run": "s"}, uid=3))
    assert [record.id for record in records.orphans({"run": "r"})] == ["b"]
    assert [record.id for record in records.orphans({})] == ["b", "c"]


@pytest.mark.parametrize(("size", "cap", "kept"), [(10, 100, 10), (100, 100, 100), (101, 100, 100), (70_000, 11, 11)])
async def test_a_drain_keeps_the_first_and_last_half_of_its_cap(size: int, cap: int, kept: int) -> None:
    data = bytes(n % 251 for n in range(size))
    read, write = os.pipe()
    drain, feed = Drain(read, cap), Feed(write, data)
    await asyncio.wait_for(drain.ended, 5)
    feed.close()
    assert len(drain.kept.data) == kept
    assert drain.kept.truncated == (size > cap)
    head = cap - cap // 2
    assert drain.kept.data[:head] == data[:head]
    assert drain.kept.data[head:] == data[head:][-(kept - head) :] or kept <= head


class Unmounted(Stage):
    """A stage that only says what it would do."""

    def __init__(self) -> None:
        self.places: dict[str, str] = {}
        self.dropped: list[str] = []

    def bind(self, real: str) -> str:
        return real

    def drop(self, real: str) -> None:
        self.dropped.append(self.places.pop(real))


def test_a_host_folder_that_every_sandbox_shows_is_never_dropped_for_others(tmp_path: Path) -> None:
    stage = Unmounted()
    folders = [tmp_path / str(number) for number in range(400)]
    for folder in folders:
        folder.mkdir()
        stage.place(str(tmp_path))
        stage.place(str(folder))
    assert len(stage.places) == 256
    assert stage.dropped == [str(folder) for folder in folders[: 401 - 256]]

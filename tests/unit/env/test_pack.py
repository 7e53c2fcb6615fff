import io
import tarfile

import pytest

from openforge.env.contract import TaskFile
from openforge.env.pack import UnusableWork, cleaned, pack


def _tar(*entries: tarfile.TarInfo, content: bytes = b"x") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for entry in entries:
            if entry.isreg():
                entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content) if entry.isreg() else None)
    return buffer.getvalue()


def _entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname, entry.mode, entry.uid, entry.uname = kind, link, mode, 0, "root"
    return entry


def _names(tar: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(tar)) as read:
        return read.getnames()


def test_only_what_lies_below_the_workspace_is_kept() -> None:
    work = _tar(
        _entry("workspace", tarfile.DIRTYPE, mode=0o755),
        _entry("workspace/a"),
        _entry("./workspace/b/c"),
        _entry("tests/check.sh"),
        _entry("workspace/../tests/check.sh"),
        _entry("/tests/check.sh"),
        _entry("workspaces/d"),
    )
    assert _names(cleaned(work)) == ["a", "b/c"]


def test_nothing_is_written_through_a_link_or_a_file() -> None:
    work = _tar(
        _entry("workspace/out", tarfile.SYMTYPE, link="/tests"),
        _entry("workspace/out/check.sh"),
        _entry("workspace/file"),
        _entry("workspace/file/below"),
        _entry("workspace/real/a"),
        _entry("workspace/real", tarfile.SYMTYPE, link="/tests"),
    )
    assert _names(cleaned(work)) == ["file", "real/a"]


@pytest.mark.parametrize(
    "target",
    ["a", "./a", "../a", "../b/c", "..", "/workspace/a", "/usr/bin/python3", "/lib64/ld-linux-x86-64.so.2"],
)
def test_a_link_to_the_work_or_to_a_program_is_kept(target: str) -> None:
    assert _names(cleaned(_tar(_entry("workspace/d/link", tarfile.SYMTYPE, link=target)))) == ["d/link"]


@pytest.mark.parametrize(
    "target",
    [
        "/tests/expected", "/", "//tests/expected", "/proc/self/fd/0", "/etc/passwd", "/workspace/../tests/expected",
        "/usr/../tests/expected", "../../tests/expected", "./../../tests", "here/../../../tests/expected",
        "here/here/../../../tests/expected", "../here/../tests",
    ],
)  # fmt: skip
def test_a_link_that_could_lead_elsewhere_is_left_out(target: str) -> None:
    work = _tar(
        _entry("workspace/here", tarfile.SYMTYPE, link="."), _entry("workspace/d/link", tarfile.SYMTYPE, link=target)
    )
    assert _names(cleaned(work)) == ["here"]


def test_devices_pipes_and_hard_links_are_left_out_and_special_modes_are_dropped() -> None:
    work = _tar(
        _entry("workspace/null", tarfile.CHRTYPE),
        _entry("workspace/pipe", tarfile.FIFOTYPE),
        _entry("workspace/hard", tarfile.LNKTYPE, link="etc/shadow"),
        _entry("workspace/tool", mode=0o6755),
    )
    with tarfile.open(fileobj=io.BytesIO(cleaned(work))) as tar:
        (tool,) = tar.getmembers()
    assert (tool.name, tool.mode, tool.uname) == ("tool", 0o755, "")


def test_a_second_entry_of_a_name_is_left_out() -> None:
    assert _names(cleaned(_tar(_entry("workspace/a"), _entry("workspace/a", tarfile.SYMTYPE, link="/")))) == ["a"]


@pytest.mark.parametrize("work", [b"no tar", b"\0" * 100, _tar(_entry("workspace/a"), content=b"y" * 2000)[:1500]])
def test_bytes_that_are_no_whole_tar_are_unusable(work: bytes) -> None:
    with pytest.raises(UnusableWork, match="no readable tar"):
        cleaned(work)


def test_too_many_files_are_unusable() -> None:
    with pytest.raises(UnusableWork, match="more than 10 files"):
        cleaned(_tar(*(_entry(f"workspace/{number}") for number in range(11))), most_entries=10)


def test_no_bytes_are_no_work() -> None:
    assert _names(cleaned(b"")) == []


def test_the_same_files_make_the_same_tar() -> None:
    first = {"a": TaskFile(content=b"1"), "b/c": TaskFile(content=b"2", mode=0o755)}
    assert pack(first) == pack(dict(reversed(first.items())))
    assert _names(pack(first)) == ["a", "b/c"]

"""What every driver promises of files, archives and folders, tried on each driver of `CASES`."""

import asyncio
import io
import tarfile

import pytest
from sandbox_drivers import Case
from sandbox_fixtures import sh

from openforge.sandbox.contract import PathRefused, Sandbox, SandboxDriver

pytestmark = pytest.mark.asyncio(loop_scope="module")


def tar_with(*members: tarfile.TarInfo) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for member in members:
            archive.addfile(member, io.BytesIO(b"x" * member.size))
    return out.getvalue()


def member(name: str, *, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 0) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, size
    return info


@pytest.mark.parametrize("size", [0, 1, 8 << 20])
async def test_a_file_comes_back_as_it_was_put(box: Sandbox, size: int) -> None:
    data = (b"\x00\xff\n" * (size // 3 + 1))[:size]
    await box.put("/workspace/new/folder/data.bin", data, mode=0o755)
    assert await box.get("/workspace/new/folder/data.bin") == data
    assert (await sh(box, "stat -c %a new/folder/data.bin")).stdout == b"755\n"


@pytest.mark.parametrize(
    "path",
    [
        "relative",
        "/workspace/../etc/passwd",
        "/workspace/a\0b",
        "/" + "x" * 5000,
        "/workspace/absent",
        "/workspace",
        "/dev/zero",
    ],
)
async def test_a_path_that_is_no_file_within_is_refused(box: Sandbox, path: str) -> None:
    with pytest.raises(PathRefused):
        await box.get(path)


async def test_traps_for_the_reader_are_refused_quickly(box: Sandbox) -> None:
    await sh(
        box,
        "mkfifo fifo; truncate -s 100G sparse; ln -s /etc/shadow shadow; ln -s loop loop; ln -s /proc/1/root/root up",
    )
    for name in ("fifo", "sparse", "shadow", "loop", "up"):
        with pytest.raises(PathRefused):
            await asyncio.wait_for(box.get(f"/workspace/{name}"), 10)


async def test_links_lead_to_files_of_the_sandbox_only(box: Sandbox) -> None:
    await sh(box, "ln -s /etc/hostname name; ln -s ../../../../../../etc/hostname far")
    assert (await box.get("/workspace/name")).strip() == b"sandbox"  # Podman writes no newline
    assert (await box.get("/workspace/far")).strip() == b"sandbox"


async def test_writing_where_nothing_may_be_written_is_refused(box: Sandbox) -> None:
    await sh(box, "mkfifo fifo")
    for path in ("/etc/passwd", "/usr/bin/sh", "/new", "/workspace/fifo", "/workspace"):
        with pytest.raises(PathRefused):
            await asyncio.wait_for(box.put(path, b"x"), 10)


async def test_an_archive_goes_out_and_comes_back_the_same(box: Sandbox, driver: SandboxDriver, case: Case) -> None:
    await sh(
        box,
        "mkdir -p d/empty d/closed; echo one > d/a; printf x > d/run; chmod 755 d/run; ln -s a d/link; mkfifo d/fifo;"
        " echo s > d/closed/secret; chmod 000 d/closed/secret d/closed; touch \"$(printf 'd/\\377')\"",
    )
    tar = await box.get_tar(["/workspace"])
    assert tar == await box.get_tar(["/workspace"])
    other = await driver.create(case.spec("other"))
    await other.put_tar("/", tar)
    listing = "find . -mindepth 1 -printf '%P %m %y %l\\n' 2>/dev/null | LC_ALL=C sort"
    expected = b"".join(line + b"\n" for line in (await sh(box, listing)).stdout.splitlines() if b"fifo" not in line)
    assert (await sh(other, listing)).stdout == expected
    await other.stop()


async def test_an_archive_over_the_cap_is_refused(box: Sandbox) -> None:
    await sh(box, "head -c 2000000 /dev/zero > big")
    with pytest.raises(PathRefused):
        await box.get_tar(["/workspace"], cap=1_000_000)


@pytest.mark.parametrize(
    "tar",
    [
        tar_with(member("../out", size=1)),
        tar_with(member("/tmp/out", size=1)),
        tar_with(member("a/../../out", size=1)),
        tar_with(member("pipe", kind=tarfile.FIFOTYPE)),
        tar_with(member("device", kind=tarfile.CHRTYPE)),
        tar_with(member("hard", kind=tarfile.LNKTYPE, link="/etc/passwd")),
        tar_with(member("door", kind=tarfile.SYMTYPE, link="/tmp"), member("door/out", size=1)),
        b"no tar at all" * 100,
    ],
)
async def test_an_archive_that_leaves_its_folder_is_refused(box: Sandbox, tar: bytes) -> None:
    with pytest.raises(PathRefused):
        await box.put_tar("/workspace", tar)
    assert (await sh(box, "ls /tmp")).stdout == b""


async def test_a_thousand_files_and_a_deep_folder_can_be_collected(box: Sandbox) -> None:
    await sh(
        box,
        "for i in $(seq 1000); do echo $i > f$i; done"
        " && for i in $(seq 300); do mkdir deep-deep-deep; cd deep-deep-deep; done",
    )
    with tarfile.open(fileobj=io.BytesIO(await box.get_tar(["/workspace"]))) as archive:
        assert len(archive.getnames()) > 1200


async def test_a_folder_is_listed_by_name_with_kinds_and_sizes(box: Sandbox) -> None:
    await sh(box, "mkdir d; printf 12345 > b; ln -s d a; ln -s /absent c; mkfifo e; ln -s loop loop; touch -d @86400 b")
    files = await box.list_files("/workspace")
    kinds = {file.name: file.kind for file in files}
    assert kinds == {"a": "folder", "b": "file", "c": "link", "d": "folder", "e": "other", "loop": "link"}
    assert list(kinds) == sorted(kinds)
    assert [(file.size, file.modified) for file in files if file.name == "b"] == [(5, 86400.0)]


@pytest.mark.parametrize("path", ["/workspace/file", "/absent", "relative", "/workspace/../etc"])
async def test_only_a_folder_can_be_listed(box: Sandbox, path: str) -> None:
    await box.put("/workspace/file", b"")
    with pytest.raises(PathRefused):
        await box.list_files(path)


async def test_a_folder_with_too_many_entries_is_refused(box: Sandbox) -> None:
    await sh(box, "seq 300 | xargs touch")
    assert len(await box.list_files("/workspace", most=300)) == 300
    with pytest.raises(PathRefused, match="more than 299"):
        await box.list_files("/workspace", most=299)

"""Every store of blobs keeps the same promises. S3 is shown on obstore's memory store."""

import secrets
from collections.abc import Callable
from pathlib import Path

import pytest
from obstore.store import MemoryStore

from openforge.blobs import BlobLost, Blobs, DirectoryBlobs, blobs_at
from openforge.blobs.s3 import S3Blobs
from openforge.protos import BlobRef

STORES: dict[str, Callable[[Path], Blobs]] = {
    "directory": DirectoryBlobs,
    "s3": lambda _: S3Blobs(MemoryStore()),
}


@pytest.fixture(params=STORES)
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Blobs:
    return STORES[request.param](tmp_path / "blobs")


@pytest.mark.parametrize("size", [0, 1, 1_000_003])
async def test_a_blob_comes_back_as_it_was(blobs: Blobs, size: int) -> None:
    data = secrets.token_bytes(size)
    ref = await blobs.put(data)
    assert await blobs.put(data) == ref
    assert await blobs.get(ref) == data


async def test_a_blob_that_is_not_there_is_lost_and_says_so(blobs: Blobs) -> None:
    with pytest.raises(BlobLost, match="0000"):
        await blobs.get(BlobRef("0" * 64, 10))


async def test_a_deleted_blob_is_lost(blobs: Blobs) -> None:
    ref = await blobs.put(b"bytes")
    await blobs.delete(ref)
    await blobs.delete(ref)
    with pytest.raises(BlobLost):
        await blobs.get(ref)


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


async def test_bytes_that_changed_on_disk_are_lost_and_not_given(tmp_path: Path) -> None:
    blobs = DirectoryBlobs(tmp_path)
    ref = await blobs.put(b"bytes")
    [path] = files_of(tmp_path)
    path.write_bytes(b"other")
    with pytest.raises(BlobLost, match="other bytes"):
        await blobs.get(ref)


async def test_no_half_written_file_is_left(tmp_path: Path) -> None:
    await DirectoryBlobs(tmp_path).put(b"bytes")
    assert [path.name[0] for path in files_of(tmp_path)] != ["."]


async def test_a_location_names_its_store(tmp_path: Path) -> None:
    assert isinstance(blobs_at(str(tmp_path)), DirectoryBlobs)
    assert isinstance(blobs_at(f"file://{tmp_path}"), DirectoryBlobs)
    for wrong in ("relative/folder", "ftp://host/x"):
        with pytest.raises(ValueError, match="s3://bucket/prefix"):
            blobs_at(wrong)

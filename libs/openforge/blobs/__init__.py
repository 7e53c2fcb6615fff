"""Large bytes by digest: in a folder or in S3 here, in the bus's own object store by `openforge.bus`."""

from openforge.blobs.contract import BlobLost, Blobs, check, ref_to
from openforge.blobs.directory import DirectoryBlobs


def blobs_at(location: str) -> Blobs:
    """The store at a folder (`/path`, `file:///path`) or at `s3://bucket/prefix`."""
    if location.startswith("s3://"):
        from openforge.blobs.s3 import S3Blobs

        return S3Blobs.at(location)
    folder = location.removeprefix("file://")
    if "://" in folder or not folder.startswith("/"):
        raise ValueError(f"OPENFORGE_BLOBS = {location!r}: use a folder like /data/blobs, or s3://bucket/prefix")
    return DirectoryBlobs(folder)


__all__ = ["BlobLost", "Blobs", "DirectoryBlobs", "blobs_at", "check", "ref_to"]

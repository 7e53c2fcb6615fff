"""One digest for one drawn task: equal on every machine, different as soon as one byte of it is."""

from collections.abc import Mapping
from hashlib import sha256

import msgspec

from openforge.env.contract import TaskFile, TaskInstance


def digest_of(instance: TaskInstance) -> str:
    """sha256 (hex) over everything that the agent, the checks and the reference see."""
    seen = msgspec.structs.asdict(instance)
    del seen["digest"]
    seen["workspace"] = _sorted(instance.workspace)
    seen["tests"] = _sorted(instance.tests)
    seen["service_files"] = _sorted(instance.service_files)
    if not instance.services and not instance.service_files:  # a task without them is what it was before there were any
        del seen["services"], seen["service_files"]
    for later in ("collect", "transcript"):
        if not seen[later]:
            del seen[later]
    return sha256(msgspec.msgpack.encode(seen, order="sorted")).hexdigest()


def with_digest(instance: TaskInstance) -> TaskInstance:
    return msgspec.structs.replace(instance, digest=digest_of(instance))


def _sorted(files: Mapping[str, TaskFile]) -> list[tuple[str, TaskFile]]:
    return sorted(files.items())

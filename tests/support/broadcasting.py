"""The process that broadcasts published weights."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from openforge.bus.server import free_port


@contextmanager
def sender(root: Path, bucket_bytes: int) -> Iterator[str]:
    """Its address; over gloo."""
    address = f"127.0.0.1:{free_port()}"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "openforge.learner.broadcast", "--root", str(root), "--listen", address),
            *("--transport", "gloo", "--bucket-bytes", str(bucket_bytes)),
        ],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(("protos", "libs", "services"))},
    )
    try:
        yield address
    finally:
        process.terminate()
        process.wait(30)

"""Real drivers for tests; where this host cannot isolate, a test says why it skips."""

import os
import secrets
from pathlib import Path

import pytest

from openforge.sandbox.contract import SandboxLimits
from openforge.sandbox.process import CannotIsolate, ProcessDriver

SMALL = SandboxLimits(memory_mb=192, pids=64, disk_mb=16)


def full_driver(state_dir: Path, proxy_socket: Path | None = None) -> ProcessDriver:
    try:
        return ProcessDriver(state_dir, proxy_socket=proxy_socket, owner=f"test-{secrets.token_hex(3)}")
    except CannotIsolate as reason:
        if os.environ.get("OPENFORGE_REQUIRE_SANDBOXES"):
            raise
        pytest.skip(str(reason))

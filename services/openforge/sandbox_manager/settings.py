"""What the environment says to the sandbox manager."""

from pathlib import Path

import msgspec


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """`manager_slots` attempts run at once; each costs its sandbox's memory limit at worst.

    `manager_creates` bounds how many sandboxes are being made at once: more makes all of them slower.
    `env_host_memory_mb` bounds the process that runs pipelines, all episodes together. `manager` tells
    several managers of one run apart. `sockets` holds the model proxy's `proxy.sock`.
    """

    run: str
    home: Path
    sockets: Path
    manager: str = "manager"
    manager_slots: int = 64
    manager_creates: int = 4
    env_host_memory_mb: int = 4096
    env_host_threads: int = 64

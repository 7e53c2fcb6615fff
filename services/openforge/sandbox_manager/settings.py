"""What the environment says to the sandbox manager."""

from pathlib import Path

from openforge.sandbox_manager.api.settings import ApiSettings


class Settings(ApiSettings, frozen=True, kw_only=True):
    """`manager_slots` attempts run at once; each costs its sandbox's memory limit at worst.

    `manager_creates` bounds how many sandboxes are being made at once: more makes all of them slower.
    `manager_warm` are made ahead, in the shape of the first attempt's: each costs some MB until it is used.
    `env_host_memory_mb` bounds the process that runs pipelines, all episodes together, and `env_host_cpus` its
    processors, 0 for all of this machine's. `manager` tells
    several managers of one run apart. `sockets` holds the model proxy's `proxy.sock`. With
    `sandbox_api_port` it serves sandboxes to clients too.
    """

    run: str
    home: Path
    sockets: Path
    manager: str = "manager"
    manager_slots: int = 64
    manager_creates: int = 4
    manager_warm: int = 0
    env_host_memory_mb: int = 4096
    env_host_cpus: float = 0.0
    env_host_threads: int = 64

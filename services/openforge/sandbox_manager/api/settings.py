"""What the environment says to the sandbox API."""

from openforge.sandbox.choice import DriverSettings


class ApiSettings(DriverSettings, frozen=True, kw_only=True):
    """`sandbox_api_port` 0 serves no API. `sandbox_api_keys`: each opens everything, or with `SECRET=OWNER` the
    sandboxes of that owner alone, or with `SECRET=OWNER/read` only looking at them.

    `sandbox_api_boxes` live at once, `sandbox_api_creates` are made at once and `sandbox_api_waiting` wait for
    that; who comes then gets 503 and a time to come back. `sandbox_api_execs` commands run at once.
    `sandbox_api_warm` sandboxes of the default size are made ahead: each costs about 2 MB until it is used.
    `sandbox_api_memory_mb` is the most that one may have, however much is asked for, `sandbox_api_disk_mb` what it
    can write: files lie in memory. `sandbox_api_url` is how the other replicas reach this one.
    """

    sandbox_api_port: int = 0
    sandbox_api_host: str = "127.0.0.1"
    sandbox_api_keys: tuple[str, ...] = ()
    sandbox_api_url: str = ""
    sandbox_api_boxes: int = 256
    sandbox_api_creates: int = 8
    sandbox_api_waiting: int = 256
    sandbox_api_execs: int = 400
    sandbox_api_warm: int = 0
    sandbox_api_memory_mb: int = 4096
    sandbox_api_disk_mb: int = 256
    sandbox_api_pids: int = 512
    sandbox_api_ttl_s: float = 7200.0
    sandbox_api_heartbeat_s: float = 180.0
    sandbox_api_output_mb: int = 4
    sandbox_api_sweep_s: float = 2.0

"""What is to be looked at."""

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from openforge.bus import BusSettings


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """Empty fields are not looked at. `keys` is the folder of seeds, `folders` what services write to, `health` the
    folder of health files. `clock` is this machine's, in Unix seconds.
    """

    bus: BusSettings
    run: str = ""
    keys: Path | None = None
    engine_url: str = ""
    proxy_url: str = ""
    model: str = ""
    health: Path | None = None
    folders: tuple[Path, ...] = ()
    free_mb: int = 1024
    sandbox: bool = True
    skew_s: float = 2.0
    clock: Callable[[], float] = time.time

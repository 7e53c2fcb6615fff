"""What the learner reads from its environment."""

from __future__ import annotations

from pathlib import Path

import msgspec


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """`run` is the run to train. `home` is its folder: `weights/` and `checkpoints/` lie there, about two and
    twelve bytes for each parameter and each one kept. `broadcast_listen` is HOST:PORT where engines meet the learner if
    the run file's `engine.weight_path` is not `disk`: a private address that they can reach, for it has no
    authentication; port 0 is any free one."""

    run: str
    home: Path
    broadcast_listen: str = "127.0.0.1:0"

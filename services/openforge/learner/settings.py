"""What the learner reads from its environment."""

from __future__ import annotations

from pathlib import Path

import msgspec


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """`run` is the run to train. `home` is its folder: `weights/` and `checkpoints/` lie there, about two and
    twelve bytes for each parameter and each one kept."""

    run: str
    home: Path

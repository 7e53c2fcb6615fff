"""What the scheduler reads from its environment."""

import msgspec


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """`run` is the run to pace, `*` all of them. `engines` is how many engine processes serve it at once: the
    slowest of them counts. A snapshot every `scheduler_snapshot_every` facts costs one small write each and bounds
    what a restart has to read.
    """

    run: str = "*"
    engines: int = 1
    scheduler_snapshot_every: int = 2000

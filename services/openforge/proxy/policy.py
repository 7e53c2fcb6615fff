"""Which weight version is served, as far as the bus has told."""

from openforge.bus import CAUGHT_UP, Bus
from openforge.protos import PolicyServed


class Policy:
    """`salt` keys the engine's prefix cache, so that no other version's cache can answer."""

    def __init__(self) -> None:
        self.version = 0
        self.salt = "v0-0"

    async def follow(self, bus: Bus, run: str) -> None:
        async for told in bus.follow(("policy",), run=run):
            if told is not CAUGHT_UP and isinstance(told.fact, PolicyServed) and told.fact.version >= self.version:
                self.version = told.fact.version
                self.salt = f"v{told.fact.version}-{told.fact.incarnation}"

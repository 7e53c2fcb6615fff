"""What every call of the process shares."""

import asyncio
from dataclasses import dataclass

from openforge.bus import Bus
from openforge.chat.contract import Renderer
from openforge.proxy.foreign import Foreign
from openforge.proxy.policy import Policy
from openforge.proxy.settings import Settings
from openforge.proxy.upstream import Engine
from openforge.runs import RunConfig


@dataclass(slots=True, frozen=True)
class Context:
    """`fatal` ends the process: its exception is the reason. `foreign`, if there, answers instead of `engine`."""

    settings: Settings
    config: RunConfig
    renderer: Renderer
    engine: Engine
    policy: Policy
    bus: Bus
    fatal: "asyncio.Future[None]"
    foreign: Foreign | None = None

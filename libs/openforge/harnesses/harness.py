"""What a harness is: a pinned package, how it is started, and the tool by which a model runs a command in it."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from openforge.env.contract import CommandAgent

Dialect = Literal["chat", "responses", "messages", "gemini"]

INSIDE = "/opt/harness"
"""Where a sandbox shows the installed harness; the same for all, so that prompts that name it are the same."""
NODE = "/opt/node"
SCRATCH = "/tmp/harness"
"""Configuration and state of the harness in the box: never in the workspace."""
HOME = f"{SCRATCH}/home"


EVERYWHERE = ("plain", "faults", "real")
"""The scenarios of every harness."""
HELPER = "helper"
"""In the mark of a job that one agent gives another."""


def mark(harness: str, scenario: str) -> str:
    """The line of an instruction by which script and line know whose job it is."""
    return f"(openforge-conformance {harness} {scenario})"


class UnknownHarness(LookupError):
    """There is no harness of that name; the message says which there are."""


class Npm(msgspec.Struct, frozen=True, kw_only=True):
    """A package for Node. `program` is the name under `node_modules/.bin`."""

    package: str
    program: str


class Pip(msgspec.Struct, frozen=True, kw_only=True):
    """A package for Python in a virtual environment of its own; `distribution` is what tells the version.

    `apt` names Debian packages that it needs beside it, by the program that they bring.
    """

    package: str
    distribution: str
    apt: Mapping[str, str] = {}


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """What a harness is started with.

    `base_url` is the attempt's, without `/v1`. `context`: the model's window. `scenario`: that of the conformance job.
    """

    base_url: str
    key: str
    model: str
    instruction: str
    context: int
    max_tokens: int
    scenario: str = "plain"

    @property
    def v1(self) -> str:
        return f"{self.base_url}/v1"


class ToolUse(msgspec.Struct, frozen=True):
    """A call as the harness's own tools want it."""

    name: str
    arguments: Mapping[str, Any]


class Habits(msgspec.Struct, frozen=True):
    """What a harness is known to do in a run of our script; anything else is news.

    `breaks` are the branches that it begins beside the first, by cause, and `why` says what for; of its calls,
    `sub_agent_calls` are made by a sub-agent.
    """

    breaks: Mapping[str, int] = {}
    why: str = ""
    sub_agent_calls: int = 0


class Harness(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table.

    `shell` turns a command into a call of the harness's own tool, `finish` is the call by which its agent ends where
    a plain last word does not. `spoken` is for a harness without tools: from the text of its prompt to the model's
    reply. `delegate` turns a job into the call that gives it to a sub-agent, `wait` the text of a prompt into the call
    that waits for what it did, and `helped` is the call by which a sub-agent ends where a plain last word does not.
    `habits` are those of the job without faults, `more` those of further scenarios that the harness has: `thinking`
    (each answer begins with reasoning), `delegation` (to a sub-agent) and `compaction`. `fatal` names the faults of the
    line at which it gives up by its own decision. `memory_mb` and `disk_mb` are what its sandbox needs.
    """

    name: str
    version: str
    dialect: Dialect
    install: Npm | Pip
    start: Callable[[Launch], CommandAgent]
    shell: Callable[[str], ToolUse]
    finish: ToolUse | None = None
    spoken: Callable[[str], str] | None = None
    delegate: Callable[[str], ToolUse] | None = None
    wait: Callable[[str], ToolUse] | None = None
    helped: ToolUse | None = None
    habits: Habits = Habits()
    more: Mapping[str, Habits] = {}
    fatal: frozenset[str] = frozenset()
    memory_mb: int = 1024
    disk_mb: int = 128
    fast: bool = False

    @property
    def tools(self) -> bool:
        """Whether its model works by calling tools."""
        return self.spoken is None

    @property
    def scenarios(self) -> tuple[str, ...]:
        return (*EVERYWHERE, *self.more)

    @property
    def folder(self) -> str:
        return f"{self.name}-{self.version}"

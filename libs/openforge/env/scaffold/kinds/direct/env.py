"""The environment `example`: OpenForge's own loop asks the model, this says what a reply does. Copied by `env new`."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from openforge.env.contract import DirectEnv, HarnessKind, Step, TaskTemplate
from openforge.env.layout import load_tasks
from openforge.sandbox.contract import Sandbox

HERE = Path(__file__).parent
SYSTEM = "You work in a Linux shell, with the tool `sh`. When the task is done, answer without calling it."
SH = {
    "type": "function",
    "function": {
        "name": "sh",
        "description": "Run a command",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}

HARNESSES: dict[str, HarnessKind] = {"react": "direct"}


@cache
def tasks() -> Sequence[TaskTemplate]:
    """One folder each in `tasks/`."""
    return load_tasks(HERE / "tasks")


def create_direct(sandbox: Sandbox, *, harness: str) -> DirectEnv:
    return Shell(sandbox)


class Shell:
    """What the model sees and what its replies do."""

    tools: Sequence[Mapping[str, Any]] = (SH,)

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._commands = 0

    async def reset(self, instruction: str) -> Sequence[Mapping[str, Any]]:
        return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": instruction}]

    async def step(self, reply: Mapping[str, Any]) -> Step:
        calls = reply.get("tool_calls") or []
        observations = [await self._run(call["function"]["arguments"]) for call in calls]
        return Step(observations=tuple(observations), done=not calls, metrics={"commands": float(self._commands)})

    async def _run(self, arguments: str) -> str:
        try:
            command = str(json.loads(arguments)["command"])
        except (ValueError, KeyError, TypeError) as error:
            return f"The call is broken: {error!r}"
        self._commands += 1
        done = await self._sandbox.exec(command, timeout_s=30)
        shown = (done.stdout + done.stderr).decode(errors="replace")[-2000:]
        return f"Exit code {done.exit_code}\n{shown}"

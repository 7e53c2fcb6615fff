"""ClawEval's tools as a direct environment: each call is one request to a service of the task.

Promises: what the model writes reaches a service as the body of a request and is executed nowhere; calls and answers
are kept in the box, for the grader; the first reply without a call is the agent's last word.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from openforge.env.claw_eval.loader import SERVICE_ARGV, tools_of
from openforge.env.contract import SERVICES_FOLDER, Step
from openforge.sandbox.contract import Sandbox

SYSTEM = (
    "You are an assistant who works with tools. Call them to find out what you need and to do what you are asked; "
    "when you are done, answer with a message that calls none."
)
CALL_TIMEOUT_S = 60.0
_SHOWN_BYTES = 32_000


class ClawEvalTools:
    """`system` replaces the first message."""

    def __init__(self, sandbox: Sandbox, *, system: str = SYSTEM) -> None:
        self.tools: Sequence[Mapping[str, Any]] = ()
        self._sandbox = sandbox
        self._system = system
        self._used: set[str] = set()
        self._calls = 0

    async def reset(self, instruction: str) -> Sequence[Mapping[str, Any]]:
        self.tools = tools_of(msgspec.json.decode(await self._sandbox.get(f"{SERVICES_FOLDER}/task.json")))
        return [{"role": "system", "content": self._system}, {"role": "user", "content": instruction}]

    async def step(self, reply: Mapping[str, Any]) -> Step:
        calls = reply.get("tool_calls") or []
        texts = [await self._call(call) for call in calls]
        coverage = len(self._used) / len(self.tools) if self.tools else 0.0
        metrics = {"tool_calls": float(self._calls), "tool_coverage": coverage}
        return Step(observations=tuple(texts), done=not calls, metrics=metrics)

    async def _call(self, call: Mapping[str, Any]) -> str:
        function = call.get("function") or {}
        name, arguments = str(function.get("name") or ""), str(function.get("arguments") or "{}")
        self._calls += 1
        if any(tool["function"]["name"] == name for tool in self.tools):
            self._used.add(name)
        result = await self._sandbox.exec(
            (*SERVICE_ARGV, "call", name, "-", str(call.get("id") or "")),
            timeout_s=CALL_TIMEOUT_S,
            cwd=SERVICES_FOLDER,
            stdin=arguments.encode(errors="replace"),
            output_cap=_SHOWN_BYTES,
        )
        if result.timed_out:
            return f"Error: the tool did not answer within {CALL_TIMEOUT_S:.0f} s"
        return (result.stdout or result.stderr).decode(errors="replace").strip()

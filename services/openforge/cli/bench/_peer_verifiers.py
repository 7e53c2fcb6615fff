"""The interception server of `verifiers`, for `bench proxy`: run by the interpreter that it is installed for.

A bearer key that nobody used before opens a rollout of its own; calls are relayed to the engine's Chat Completions
and committed to the rollout's trace in memory.
"""

import asyncio
import sys
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.clients.client import ModelContext
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.interception.server import InterceptionServer
from verifiers.v1.session import RolloutSession
from verifiers.v1.task import TaskData
from verifiers.v1.trace import AgentInfo, Trace, TraceTask


class Rollouts(dict[str, Any]):
    """The server's sessions by key."""

    def __init__(self, server: Any, engine_url: str) -> None:
        self._server = server
        self._engine_url = engine_url

    def get(self, key: str, default: Any = None) -> Any:
        if key not in self:
            context = ModelContext(model="m", client=EvalClientConfig(base_url=self._engine_url, api_key_var="NO_KEY"))
            trace = Trace(
                task=TraceTask(type="Task", data=TaskData(prompt="bench")), agent=AgentInfo(config=vf.AgentConfig())
            )
            secret, _ = self._server.register(RolloutSession(ctx=context, trace=trace))
            self[key] = self.pop(secret)
        return self[key]


async def serve(engine_url: str) -> None:
    async with InterceptionServer() as server:
        server.sessions = Rollouts(server, engine_url)
        print(f"port {server.port}", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))

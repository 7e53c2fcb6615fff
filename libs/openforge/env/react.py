"""Our own ReAct loop: asks the policy, lets a direct environment act on the reply, shows what came of it.

Promises: every model call goes through `llm_args`, so it is recorded like any harness's; the environment alone
touches the sandbox; each way in which an episode can end has one status.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
import msgspec

from openforge.env.contract import DirectEnv, EnvCallResult, LlmArgs, Step
from openforge.sandbox.contract import SandboxLost

CALL_TIMEOUT_S = 600.0
PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 8.0)
"""Before asking again: together longer than a service takes to restart."""

_ENDS = {"context_length_exceeded": "out_of_context", "turn_limit_reached": "out_of_turns"}


class _Refused(Exception):
    """The call is answered with no reply: `status` is how the episode ends."""

    def __init__(self, status: str, cause: str = "") -> None:
        super().__init__(cause)
        self.status = status


class ReactLoop:
    """A pipeline made of a direct environment. `turns` bounds its replies; 0 leaves that to the proxy."""

    def __init__(self, env: DirectEnv, *, turns: int = 0, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._env = env
        self._turns = turns
        self._transport = transport

    async def run(self, *, instruction: str, llm_args: LlmArgs, **_: Any) -> EnvCallResult:
        headers = {"Authorization": f"Bearer {llm_args.api_key}"}
        async with httpx.AsyncClient(
            base_url=llm_args.base_url, headers=headers, timeout=CALL_TIMEOUT_S, transport=self._transport
        ) as client:
            try:
                return await self._episode(client, instruction, llm_args)
            except SandboxLost as error:
                return EnvCallResult(status="censored", cause=f"sandbox: {error}")

    async def _episode(self, client: httpx.AsyncClient, instruction: str, llm_args: LlmArgs) -> EnvCallResult:
        messages = list(await self._env.reset(instruction))
        said: dict[str, float] = {}
        turn = 0
        while not self._turns or turn < self._turns:
            try:
                reply = await _ask(client, messages, self._env.tools, llm_args)
            except _Refused as refused:
                return _ended(refused.status, turn, said, cause=str(refused))
            turn += 1
            step = await self._env.step(reply)
            said |= step.metrics
            if step.done:
                return _ended("finished", turn, said, reward=step.reward)
            messages += [reply, *_shown(reply, step)]
        return _ended("out_of_turns", turn, said)


def _ended(
    status: str, turns: int, metrics: dict[str, float], *, reward: float | None = None, cause: str = ""
) -> EnvCallResult:
    said = {"status": status, "reward": reward, "cause": cause, "metrics": {**metrics, "turns": float(turns)}}
    return msgspec.convert(said, EnvCallResult)


def _shown(reply: dict[str, Any], step: Step) -> list[dict[str, Any]]:
    """The messages that answer a reply: one for each of its tool calls, or one of the user. Raises `ValueError`."""
    calls = reply.get("tool_calls") or []
    if len(step.observations) != max(len(calls), 1):
        raise ValueError(
            f"step() returned {len(step.observations)} observations for {len(calls)} tool calls: "
            "return one for each call, or one where there is none"
        )
    if not calls:
        return [{"role": "user", "content": step.observations[0]}]
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": text}
        for call, text in zip(calls, step.observations, strict=True)
    ]


async def _ask(
    client: httpx.AsyncClient, messages: Sequence[Any], tools: Sequence[Any], llm_args: LlmArgs
) -> dict[str, Any]:
    """The policy's reply as a Chat Completions message; raises `_Refused`."""
    body = {
        "model": llm_args.model,
        "messages": list(messages),
        "temperature": llm_args.temperature,
        "top_p": llm_args.top_p,
        "max_tokens": llm_args.max_tokens,
        **({"tools": list(tools)} if tools else {}),
        **({"stop": list(llm_args.stop)} if llm_args.stop else {}),
    }
    why = ""
    for pause_s in (*PAUSES_S, None):
        try:
            response = await client.post("/chat/completions", json=body)
        except httpx.TransportError as error:
            why = f"model call: {type(error).__name__}: {error}"
        else:
            if response.status_code == 200:
                return dict(response.json()["choices"][0]["message"])
            why = f"model call: HTTP {response.status_code}: {response.text[:300]}"
            if 400 <= response.status_code < 500 and response.status_code != 429:
                raise _Refused(_ENDS.get(_code(response), "censored"), why)
        if pause_s is not None:
            await asyncio.sleep(pause_s)
    raise _Refused("censored", why)


def _code(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return ""

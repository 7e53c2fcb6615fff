"""Answers of an endpoint that we do not serve, asked through the engine service: whole messages, no ids.

Promises: what is recorded is what it said and counted itself; nothing is tokenised here, so nothing of it can be
trained; the harness's tools, its choice of them and its schema go to the endpoint as they are.
"""

import re
from collections.abc import Sequence
from typing import Any

import httpx
import msgspec

from openforge.chat.contract import Guide, Message, Parsed, Tool, ToolCall, ToolChoice
from openforge.chat.dialect import Request
from openforge.protos import FinishReason, Sampling, Usage
from openforge.proxy.upstream import EngineBroken, EngineRefused

_ANSWER_S = 3600.0
_TRY_AGAIN = 500
_TOO_LONG = re.compile(r"context[ _]length|context window|maximum context|too many tokens|prompt is too long", re.I)
_NO_NAME = re.compile(r"[^A-Za-z0-9_-]")


class TooLong(EngineRefused):
    """The conversation no longer fits the endpoint's model."""


class Said(msgspec.Struct, frozen=True):
    """One answer. The ids of its tool calls are the endpoint's own."""

    message: Message
    finish: FinishReason
    usage: Usage


class Foreign:
    """`url` is that of our engine service, which has the key."""

    def __init__(self, url: str) -> None:
        self._client = httpx.AsyncClient(base_url=url, timeout=_ANSWER_S, limits=httpx.Limits(max_connections=None))

    async def aclose(self) -> None:
        await self._client.aclose()

    async def answer(self, request: Request, sampling: Sampling) -> Said:
        """Raises `EngineBroken` where another try may help, else `EngineRefused`."""
        try:
            response = await self._client.post("/v1/chat/completions", json=body_of(request, sampling))
        except httpx.TransportError as error:
            raise EngineBroken(f"the engine broke off: {type(error).__name__}: {error}") from error
        if response.status_code >= _TRY_AGAIN:
            raise EngineBroken(f"the engine answered {response.status_code}: {response.text[:500]}")
        if response.status_code != 200:
            refused = TooLong if _TOO_LONG.search(response.text) else EngineRefused
            raise refused(f"the engine answered {response.status_code}: {response.text[:500]}")
        try:
            answer = msgspec.json.decode(response.content)
        except msgspec.MsgspecError as error:
            raise EngineBroken(f"the engine answered what is no JSON: {error}") from error
        return said_by(answer, request.tools)


def body_of(request: Request, sampling: Sampling) -> dict[str, Any]:
    """The call as Chat Completions has it, with the run's own sampling."""
    body: dict[str, Any] = {
        "messages": [_message(message) for message in request.messages],
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_tokens,
    }
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if request.calls:
        body["tools"] = [_tool(tool) for tool in request.tools]
        body["tool_choice"] = _choice(request.tool_choice)
        if not request.parallel_calls:
            body["parallel_tool_calls"] = False
    if request.schema:
        schema = {"name": "answer", "schema": msgspec.Raw(request.schema), "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    made: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(body))
    return made


def said_by(answer: dict[str, Any], tools: Sequence[Tool]) -> Said:
    """Raises `EngineBroken` where it is no answer."""
    try:
        choice = answer["choices"][0]
        message = choice["message"]
        return Said(
            message=Message(
                role="assistant",
                content=str(message.get("content") or ""),
                reasoning=str(message.get("reasoning_content") or message.get("reasoning") or ""),
                tool_calls=tuple(_call(call, tools) for call in message.get("tool_calls") or ()),
            ),
            finish=FinishReason.LENGTH if choice.get("finish_reason") == "length" else FinishReason.STOP,
            usage=_usage(answer.get("usage") or {}),
        )
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise EngineBroken(f"the endpoint answered what is no message: {type(error).__name__}: {error}") from error


class NoTokens:
    """The renderer of a model whose tokens nobody here knows: every prompt is empty, conversations are all there is."""

    stop_token_ids: tuple[int, ...] = ()
    holds: tuple[str, ...] = ()
    thinking: tuple[str, str] | None = None
    call_ends = ""
    sees_images = False

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        return []

    def prepare(self, messages: Sequence[Message], tools: Sequence[Tool]) -> None:
        pass

    def bridge(
        self, prompt_and_answer: Sequence[int], new_messages: Sequence[Message], tools: Sequence[Tool]
    ) -> list[int] | None:
        return []

    def parse(self, ids: Sequence[int], tools: Sequence[Tool]) -> Parsed:
        return Parsed(content="")

    def guide(self, tools: Sequence[Tool], choice: ToolChoice, *, parallel: bool, schema: bytes) -> Guide | None:
        return None

    def text(self, ids: Sequence[int]) -> str:
        return ""


def _message(message: Message) -> dict[str, Any]:
    said: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        said["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": _sent(call.name), "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.role == "tool":
        said["tool_call_id"] = message.tool_call_id
    return said


def _tool(tool: Tool) -> dict[str, Any]:
    function = {"name": _sent(tool.name), "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function | ({"strict": True} if tool.strict else {})}


def _choice(choice: ToolChoice) -> Any:
    if choice.mode == "named" and len(choice.names) == 1:
        return {"type": "function", "function": {"name": _sent(choice.names[0])}}
    return "required" if choice.mode == "named" else choice.mode


def _call(call: dict[str, Any], tools: Sequence[Tool]) -> ToolCall:
    function = call["function"]
    names = {_sent(tool.name): tool.name for tool in tools}
    name = str(function["name"])
    return ToolCall(
        id=str(call.get("id") or ""), name=names.get(name, name), arguments=str(function.get("arguments") or "{}")
    )


def _sent(name: str) -> str:
    """A tool's name with nothing in it that endpoints refuse."""
    return _NO_NAME.sub("__", name)


def _usage(usage: dict[str, Any]) -> Usage:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return Usage(
        prompt_tokens=int(usage.get("prompt_tokens") or 0),
        completion_tokens=int(usage.get("completion_tokens") or 0),
        cached_tokens=None if cached is None else int(cached),
    )

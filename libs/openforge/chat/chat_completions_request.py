"""Chat Completions requests: messages in, one conversation out, with today's tools and the `functions` of old.

Promises: content as text or as parts, absent, null and empty are the same; what was sampled comes back as it was told.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from openforge.chat.contract import Message, Tool, ToolCall
from openforge.chat.dialect import BadRequest, Request, ToolChoice
from openforge.chat.fields import (
    ABSENT,
    beside,
    choice_of,
    fields_of,
    least,
    not_offered,
    recorded,
    role_of,
    stops_of,
    understood,
)
from openforge.chat.openai_forms import (
    NOT_SAMPLING,
    Content,
    CustomFormat,
    choice_in_a_word,
    custom_tool,
    gathered_from,
    sampled_arguments,
    schema_of,
)

_NOT_SAMPLING = NOT_SAMPLING | {"messages", "functions"}
LEGACY = "function_call"
"""What a request with `functions` wants: its call as `function_call`."""


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class _Custom(msgspec.Struct):
    name: str
    input: str = ""


class _Call(msgspec.Struct):
    function: _Function | None = None
    custom: _Custom | None = None
    id: str | None = None


class _Message(msgspec.Struct):
    role: str
    content: Content = None
    tool_calls: list[_Call] | None = None
    function_call: _Function | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None


class _FunctionTool(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _CustomTool(msgspec.Struct):
    name: str
    description: str | None = None
    format: dict[str, msgspec.Raw] | None = None


class _Tool(msgspec.Struct):
    type: str = "function"
    function: _FunctionTool | None = None
    custom: _CustomTool | None = None


class _Named(msgspec.Struct):
    name: str = ""


class _ChosenTool(msgspec.Struct):
    type: str = ""
    function: _Named | None = None
    custom: _Named | None = None


class _AllowedTools(msgspec.Struct):
    mode: str = "auto"
    tools: list[_ChosenTool] = []


class _Choice(msgspec.Struct):
    type: str
    function: _Named | None = None
    custom: _Named | None = None
    allowed_tools: _AllowedTools | None = None


class _JsonSchema(msgspec.Struct):
    schema: msgspec.Raw = ABSENT


class _ResponseFormat(msgspec.Struct):
    type: str
    json_schema: _JsonSchema | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Body(msgspec.Struct):
    """What the codec reads; the rest of the body is only recorded."""

    messages: list[_Message]
    model: str = ""
    tools: list[_Tool] | None = None
    tool_choice: str | _Choice | None = None
    parallel_tool_calls: bool | None = None
    functions: list[_FunctionTool] | None = None
    function_call: str | _Named | None = None
    response_format: _ResponseFormat | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None


_BODY = msgspec.json.Decoder(_Body)
_FORMAT = msgspec.json.Decoder(CustomFormat)
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


def decode(body: bytes, route: str = "chat/completions") -> Request:
    return understood("Chat Completions", lambda: _request(_BODY.decode(body), fields_of(body)))


def _request(read: _Body, fields: Mapping[str, msgspec.Raw]) -> Request:
    if not read.messages:
        raise BadRequest("messages is empty: send at least one message")
    if read.n not in (None, 1):
        raise BadRequest(f"n = {read.n} is not supported: send n = 1, or leave it out")
    tools, notes = _tools(read)
    history = _History()
    for index, message in enumerate(read.messages):
        history.add(index, message)
    legacy = bool(read.functions)
    return Request(
        model=read.model,
        messages=tuple(history.messages),
        tools=tools,
        tool_choice=_legacy_choice(read.function_call, tools) if legacy else _choice(read.tool_choice, tools),
        parallel_calls=read.parallel_tool_calls is not False and not legacy,
        schema=_schema(read.response_format),
        schema_at="response_format" if read.response_format else "",
        stream=bool(read.stream),
        include_usage=bool(read.stream_options and read.stream_options.include_usage),
        wants=(LEGACY,) if legacy else (),
        max_tokens=least("max_tokens", read.max_tokens, read.max_completion_tokens),
        stop=stops_of("stop", [read.stop] if isinstance(read.stop, str) else read.stop),
        asked=recorded(fields, _NOT_SAMPLING),
        beside=beside(fields),
        notes=notes,
        pictures=history.pictures,
    )


class _History:
    """The canonical messages of a conversation. Calls of old have no ids: they get their place as one."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.pictures: dict[str, bytes] = {}
        self._unnamed = 0

    def add(self, index: int, message: _Message) -> None:
        where = f"messages[{index}]"
        role = role_of(where, message.role, _ROLES)
        if isinstance(message.content, str) and message == _Message(message.role, message.content):
            self.messages.append(Message(role=role, content=message.content))  # type: ignore[arg-type]
            return
        gathered = gathered_from(where, role, message.content)
        self.pictures |= gathered.pictures
        calls = [
            self._call(f"{where}.tool_calls[{index}]", call) for index, call in enumerate(message.tool_calls or [])
        ]
        if message.function_call is not None:
            calls.append(self._call(where, _Call(function=message.function_call)))
        self.messages.append(
            gathered.message(
                reasoning=message.reasoning_content or "",
                tool_calls=tuple(calls),
                tool_call_id=self._unnamed_id() if message.role == "function" else message.tool_call_id or "",
                name=message.name or "",
            )
        )

    def _call(self, where: str, call: _Call) -> ToolCall:
        if call.custom is not None:
            call_id = call.id or self._next_id()
            return ToolCall(id=call_id, name=call.custom.name, arguments=sampled_arguments(call_id, call.custom.input))
        if call.function is None:
            raise BadRequest(f"{where} is neither a function nor a custom call: send one of them")
        arguments = call.function.arguments
        if isinstance(arguments, dict):
            arguments = msgspec.json.encode(arguments).decode()
        return ToolCall(id=call.id or self._next_id(), name=call.function.name, arguments=arguments or "{}")

    def _next_id(self) -> str:
        self._unnamed += 1
        return self._unnamed_id()

    def _unnamed_id(self) -> str:
        return f"call_{self._unnamed}"


def _tools(read: _Body) -> tuple[tuple[Tool, ...], tuple[str, ...]]:
    """The tools, and a note for each of those that we cannot offer."""
    kept: list[Tool] = []
    notes: list[str] = []
    for index, tool in enumerate(read.tools or []):
        if tool.type == "custom" and tool.custom is not None:
            kept.append(custom_tool(tool.custom.name, tool.custom.description or "", _format(tool.custom.format)))
        elif tool.type == "function" and tool.function is not None:
            kept.append(_function_tool(tool.function))
        else:
            notes.append(not_offered(f"tools[{index}]", tool.type))
    kept += [_function_tool(function) for function in read.functions or []]
    return tuple(kept), tuple(notes)


def _function_tool(function: _FunctionTool) -> Tool:
    return Tool(
        name=function.name,
        description=function.description or "",
        parameters=function.parameters or {},
        strict=bool(function.strict),
    )


def _format(form: dict[str, msgspec.Raw] | None) -> CustomFormat | None:
    """A grammar stands under its own key here."""
    return _FORMAT.decode(form["grammar"]) if form and "grammar" in form else None


def _choice(choice: str | _Choice | None, tools: Sequence[Tool]) -> ToolChoice:
    if choice is None or isinstance(choice, str):
        return choice_in_a_word(choice)
    if choice.allowed_tools is not None:
        mode = "named" if choice.allowed_tools.mode == "required" else "auto"
        names = [(tool.function or tool.custom or _Named()).name for tool in choice.allowed_tools.tools]
        return choice_of("tool_choice.allowed_tools", mode, names, tools)
    return choice_of("tool_choice", "named", [(choice.function or choice.custom or _Named()).name], tools)


def _legacy_choice(choice: str | _Named | None, tools: Sequence[Tool]) -> ToolChoice:
    if isinstance(choice, _Named):
        return choice_of("function_call", "named", [choice.name], tools)
    return ToolChoice("none") if choice == "none" else ToolChoice()


def _schema(form: _ResponseFormat | None) -> bytes:
    if form is None:
        return b""
    return schema_of("response_format", form.type, form.json_schema.schema if form.json_schema else ABSENT)

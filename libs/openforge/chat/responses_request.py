"""Responses requests: items in, one conversation out.

Promises: item ids and what a server would keep for itself do not count; the items of one answer are one message again;
encrypted reasoning brings the sampled reasoning back on any replica.
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
    understood,
)
from openforge.chat.openai_forms import (
    NOT_SAMPLING,
    Content,
    CustomFormat,
    Part,
    choice_in_a_word,
    custom_tool,
    gathered_from,
    sampled_arguments,
    schema_of,
)
from openforge.chat.parts import Gathered
from openforge.chat.sealed import given_back

_NOT_SAMPLING = NOT_SAMPLING | {"input", "instructions", "include", "prompt_cache_options"}


class _Kind(msgspec.Struct):
    type: str | None = None


class _Said(msgspec.Struct):
    role: str
    content: Content = None


class _FunctionCall(msgspec.Struct):
    call_id: str
    name: str
    arguments: str = ""
    namespace: str | None = None


class _CustomCall(msgspec.Struct):
    call_id: str
    name: str
    input: str = ""
    namespace: str | None = None


class _Result(msgspec.Struct):
    call_id: str
    output: Content = None


class _Reasoning(msgspec.Struct):
    summary: list[Part] | None = None
    content: list[Part] | None = None
    encrypted_content: str | None = None


class _Tool(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: CustomFormat | None = None
    tools: list[msgspec.Raw] | None = None


class _Named(msgspec.Struct):
    type: str = ""
    name: str | None = None


class _Choice(msgspec.Struct):
    type: str
    name: str | None = None
    mode: str | None = None
    tools: list[_Named] | None = None


class _Format(msgspec.Struct):
    type: str = "text"
    schema: msgspec.Raw = ABSENT


class _Text(msgspec.Struct):
    format: _Format | None = None


class _Body(msgspec.Struct):
    """What the codec reads; the rest of the body is only recorded."""

    input: str | list[msgspec.Raw]
    model: str = ""
    instructions: str | None = None
    tools: msgspec.Raw = ABSENT
    tool_choice: str | _Choice | None = None
    parallel_tool_calls: bool | None = None
    text: _Text | None = None
    max_output_tokens: int | None = None
    include: list[str] | None = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: msgspec.Raw = ABSENT
    prompt: msgspec.Raw = ABSENT


_BODY = msgspec.json.Decoder(_Body)
_TOOLS = msgspec.json.Decoder(list[msgspec.Raw] | None)
_NO_TOOLS = msgspec.Raw(b"[]")
_KIND = msgspec.json.Decoder(_Kind)
_SAID = msgspec.json.Decoder(_Said)
_FUNCTION_CALL = msgspec.json.Decoder(_FunctionCall)
_CUSTOM_CALL = msgspec.json.Decoder(_CustomCall)
_RESULT = msgspec.json.Decoder(_Result)
_REASONING = msgspec.json.Decoder(_Reasoning)
_TOOL = msgspec.json.Decoder(_Tool)
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


def decode(body: bytes, route: str = "responses") -> Request:
    return understood("Responses", lambda: _request(_BODY.decode(body), fields_of(body)))


def _request(read: _Body, fields: Mapping[str, msgspec.Raw]) -> Request:
    _refuse_what_needs_a_store(read)
    tools = _Tools()
    tools.add_all("tools", _TOOLS.decode(read.tools) or [])
    history = _History()
    if read.instructions:
        history.put(Message(role="system", content=read.instructions))
    if isinstance(read.input, str):
        history.put(Message(role="user", content=read.input))
    else:
        for index, item in enumerate(read.input):
            history.add(f"input[{index}]", bytes(item))
    messages = history.whole()
    if not read.input:
        raise BadRequest("input is empty: send a text or at least one item")
    if not messages:
        raise BadRequest(f"input has nothing that a model reads: send a message ({'; '.join(history.notes)})")
    choice, notes = _choice(read.tool_choice, tools.kept)
    form = read.text.format if read.text else None
    return Request(
        model=read.model,
        messages=messages,
        tools=tuple(tools.kept),
        tool_choice=choice,
        parallel_calls=read.parallel_tool_calls is not False,
        schema=schema_of("text.format", form.type, form.schema) if form else b"",
        schema_at="text.format" if form else "",
        stream=bool(read.stream),
        wants=tuple(read.include or ()),
        tools_as_sent=read.tools if read.tools != ABSENT else _NO_TOOLS,
        max_tokens=least("max_output_tokens", read.max_output_tokens),
        asked=recorded(fields, _NOT_SAMPLING),
        beside=beside(fields),
        notes=(*tools.notes, *history.notes, *notes, *_unkept(read)),
        pictures=history.pictures,
    )


def _refuse_what_needs_a_store(read: _Body) -> None:
    if read.previous_response_id:
        raise BadRequest(
            f"previous_response_id = {read.previous_response_id!r}: responses are not kept here, "
            "send the whole conversation in input"
        )
    if read.background:
        raise BadRequest("background = true: responses are not kept here, send the call without it")
    for name, value in (("conversation", read.conversation), ("prompt", read.prompt)):
        if value != ABSENT:
            raise BadRequest(f"{name} is kept nowhere here: send its content in input and instructions")


def _unkept(read: _Body) -> tuple[str, ...]:
    return ("store = true has no effect: responses are not kept",) if read.store else ()


class _Tools:
    def __init__(self) -> None:
        self.kept: list[Tool] = []
        self.notes: list[str] = []

    def add_all(self, where: str, tools: Sequence[msgspec.Raw], namespace: str = "", about: str = "") -> None:
        for index, raw in enumerate(tools):
            kind = _KIND.decode(raw).type or "function"
            if kind not in ("function", "custom", "namespace") or (kind == "namespace" and namespace):
                self.notes.append(not_offered(f"{where}[{index}]", kind))
                continue
            tool = _TOOL.decode(raw)
            description = "\n\n".join(filter(None, (about if index == 0 else "", tool.description)))
            if kind == "namespace":
                self.add_all(f"{where}[{index}].tools", tool.tools or [], tool.name, tool.description or "")
            elif kind == "custom":
                self.kept.append(custom_tool(tool.name, description, tool.format, namespace))
            else:
                self.kept.append(
                    Tool(
                        name=_full_name(namespace, tool.name),
                        description=description,
                        parameters=tool.parameters or {},
                        namespace=namespace,
                        strict=bool(tool.strict),
                    )
                )


def _full_name(namespace: str | None, name: str) -> str:
    return f"{namespace}.{name}" if namespace else name


class _History:
    """The canonical messages of a conversation, gathered item by item."""

    def __init__(self) -> None:
        self.pictures: dict[str, bytes] = {}
        self.notes: list[str] = []
        self._messages: list[Message] = []
        self._reasoning: str | None = None
        self._content: str | None = None
        self._calls: list[ToolCall] = []

    def add(self, where: str, item: bytes) -> None:
        match _KIND.decode(item).type or "message":
            case "message":
                self._say(where, _SAID.decode(item))
            case "function_call":
                call = _FUNCTION_CALL.decode(item)
                name = _full_name(call.namespace, call.name)
                self._calls.append(ToolCall(id=call.call_id, name=name, arguments=call.arguments or "{}"))
            case "custom_tool_call":
                custom = _CUSTOM_CALL.decode(item)
                name = _full_name(custom.namespace, custom.name)
                arguments = sampled_arguments(custom.call_id, custom.input)
                self._calls.append(ToolCall(id=custom.call_id, name=name, arguments=arguments))
            case "function_call_output" | "custom_tool_call_output":
                result = _RESULT.decode(item)
                self.put(self._gathered(where, "tool", result.output).message(tool_call_id=result.call_id))
            case "reasoning":
                self._think(_REASONING.decode(item))
            case "item_reference":
                raise BadRequest(f"{where} is an item_reference: items are not kept here, send the item itself")
            case other:
                self.notes.append(f"{where} of type {other!r} is left out: no model here makes or reads such items")

    def put(self, message: Message) -> None:
        self._close()
        self._messages.append(message)

    def whole(self) -> tuple[Message, ...]:
        self._close()
        return tuple(self._messages)

    def _say(self, where: str, said: _Said) -> None:
        role = role_of(where, said.role, _ROLES)
        message = self._gathered(where, role, said.content).message()
        if role != "assistant":
            self.put(message)
            return
        if self._content is not None or self._calls:
            self._close()
        self._content = message.content

    def _think(self, item: _Reasoning) -> None:
        """Reasoning begins an answer."""
        if self._reasoning is not None or self._content is not None or self._calls:
            self._close()
        parts = item.content or item.summary or []
        shown = "\n\n".join(part.text for part in parts if part.text)
        self._reasoning = given_back(shown, item.encrypted_content or "")

    def _close(self) -> None:
        """An answer ends where something else comes or another one begins."""
        if self._reasoning is not None or self._content is not None or self._calls:
            self._messages.append(
                Message(
                    role="assistant",
                    content=self._content or "",
                    reasoning=self._reasoning or "",
                    tool_calls=tuple(self._calls),
                )
            )
        self._reasoning = self._content = None
        self._calls = []

    def _gathered(self, where: str, role: str, content: Content) -> Gathered:
        gathered = gathered_from(where, role, content)
        self.pictures |= gathered.pictures
        return gathered


def _choice(choice: str | _Choice | None, tools: Sequence[Tool]) -> tuple[ToolChoice, tuple[str, ...]]:
    if choice is None or isinstance(choice, str):
        return choice_in_a_word(choice), ()
    match choice.type:
        case "function" | "custom":
            return choice_of("tool_choice", "named", [choice.name or ""], tools), ()
        case "allowed_tools":
            named = [tool.name for tool in choice.tools or [] if tool.name and tool.type in ("function", "custom")]
            mode = "named" if choice.mode == "required" else "auto"
            return choice_of("tool_choice.tools", mode, named, tools), ()
    return ToolChoice(), (f"tool_choice of type {choice.type!r} has no effect: that tool is not offered",)

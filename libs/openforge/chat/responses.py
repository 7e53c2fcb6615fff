"""The OpenAI Responses dialect: items in, items and their events out.

Promises: item ids and what a server would keep for itself do not count; the items of one answer are one message again;
encrypted reasoning brings the sampled reasoning back on any replica.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from openforge.chat.contract import Message, Tool, ToolCall
from openforge.chat.dialect import KEEP_ALIVE, Answer, BadRequest, Head, Problem, Request, ToolChoice
from openforge.chat.fields import ABSENT, UNREADABLE, choice_of, least, not_offered, recorded
from openforge.chat.openai_forms import (
    CustomFormat,
    custom_tool,
    error_body,
    overflow,
    sampled_arguments,
    schema_of,
    told_input,
)
from openforge.chat.parts import Gathered
from openforge.chat.sealed import given_back, seal
from openforge.protos import FinishReason

NAME = "responses"
ENCRYPTED = "reasoning.encrypted_content"

_NOT_SAMPLING = frozenset(
    {
        "input",
        "instructions",
        "tools",
        "stream",
        "stream_options",
        "include",
        "metadata",
        "client_metadata",
        "user",
        "safety_identifier",
        "store",
        "service_tier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
    }
)


class _Part(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    file_id: str | None = None


class _Kind(msgspec.Struct):
    type: str | None = None


class _Said(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None


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
    output: str | list[_Part] | None = None


class _Reasoning(msgspec.Struct):
    summary: list[_Part] | None = None
    content: list[_Part] | None = None
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


# -- requests


def decode(body: bytes, route: str = "responses") -> Request:
    try:
        return _request(_BODY.decode(body), recorded(body, _NOT_SAMPLING))
    except UNREADABLE as error:
        raise BadRequest(f"the body is not a Responses request: {error}") from error


def _request(read: _Body, asked: dict[str, Any]) -> Request:
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
        asked=asked,
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
        role = _ROLES.get(said.role)
        if role is None:
            raise BadRequest(f"{where}.role = {said.role!r} is unknown: use one of {', '.join(_ROLES)}")
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

    def _gathered(self, where: str, role: str, content: str | list[_Part] | None) -> Gathered:
        gathered = Gathered(role)
        for index, part in enumerate([_Part("text", content)] if isinstance(content, str) else content or []):
            if part.text is not None or part.refusal is not None:
                gathered.write(part.text or part.refusal or "")
            elif part.image_url or part.file_id:
                gathered.show_url(f"{where}.content[{index}].image_url", part.image_url or f"file:{part.file_id}")
            else:
                raise BadRequest(f"{where} has a part of type {part.type!r}: this model reads text and images")
        self.pictures |= gathered.pictures
        return gathered


def _choice(choice: str | _Choice | None, tools: Sequence[Tool]) -> tuple[ToolChoice, tuple[str, ...]]:
    if choice is None or isinstance(choice, str):
        if choice not in (None, "auto", "none", "required"):
            raise BadRequest(f"tool_choice = {choice!r} is unknown: use auto, none, required, or name a tool")
        return ToolChoice(choice or "auto"), ()  # type: ignore[arg-type]
    match choice.type:
        case "function" | "custom":
            return choice_of("tool_choice", "named", [choice.name or ""], tools), ()
        case "allowed_tools":
            named = [tool.name for tool in choice.tools or [] if tool.name and tool.type in ("function", "custom")]
            mode = "named" if choice.mode == "required" else "auto"
            return choice_of("tool_choice.tools", mode, named, tools), ()
    return ToolChoice(), (f"tool_choice of type {choice.type!r} has no effect: that tool is not offered",)


# -- answers


def encode(head: Head, request: Request, answer: Answer) -> bytes:
    return msgspec.json.encode(_response(head, request, _output(head, request, answer), answer))


def _output(head: Head, request: Request, answer: Answer) -> list[dict[str, Any]]:
    said = answer.message
    items: list[dict[str, Any]] = []
    if said.reasoning:
        items.append(_reasoning_item(head, request, said.reasoning))
    if said.content or not (said.reasoning or said.tool_calls):
        items.append(_message_item(head, said.content, _status(answer)))
    return items + _call_items(head, request, said.tool_calls)


def _reasoning_item(head: Head, request: Request, reasoning: str) -> dict[str, Any]:
    item: dict[str, Any] = {"id": f"rs_{head.id}", "type": "reasoning", "summary": [_summary(reasoning)]}
    if ENCRYPTED in request.wants:
        item["encrypted_content"] = seal(reasoning)
    return item


def _summary(text: str) -> dict[str, str]:
    return {"type": "summary_text", "text": text}


def _message_item(head: Head, text: str, status: str) -> dict[str, Any]:
    content = [_output_text(text)]
    return {"id": f"msg_{head.id}", "type": "message", "status": status, "role": "assistant", "content": content}


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call_items(head: Head, request: Request, calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    tools = {tool.name: tool for tool in request.tools} if calls else {}
    return [_call_item(f"{head.id}_{index}", call, tools.get(call.name)) for index, call in enumerate(calls)]


def _call_item(name: str, call: ToolCall, tool: Tool | None) -> dict[str, Any]:
    item: dict[str, Any] = {"status": "completed", "name": tool.told_name if tool else call.name}
    if tool and tool.namespace:
        item["namespace"] = tool.namespace
    if tool and tool.kind == "custom":
        call_id, text = told_input(call)
        return item | {"id": f"ctc_{name}", "type": "custom_tool_call", "call_id": call_id, "input": text}
    return item | {"id": f"fc_{name}", "type": "function_call", "call_id": call.id, "arguments": call.arguments}


def _status(answer: Answer) -> str:
    """A whole call in an answer that was cut is still a call."""
    return "incomplete" if answer.finish is FinishReason.LENGTH and not answer.message.tool_calls else "completed"


def _response(
    head: Head, request: Request, output: list[dict[str, Any]], answer: Answer | None = None
) -> dict[str, Any]:
    """What of the request is told back is what it said."""
    status = _status(answer) if answer else "in_progress"
    asked = request.asked
    return {
        "id": f"resp_{head.id}",
        "object": "response",
        "created_at": head.created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": None,
        "max_output_tokens": request.max_tokens,
        "metadata": {},
        "model": head.model,
        "output": output,
        "parallel_tool_calls": request.parallel_calls,
        "previous_response_id": None,
        "reasoning": asked.get("reasoning") or {"effort": None, "summary": None},
        "store": False,
        "temperature": asked.get("temperature"),
        "text": asked.get("text") or {"format": {"type": "text"}},
        "tool_choice": asked.get("tool_choice") or "auto",
        "tools": request.tools_as_sent,
        "top_p": asked.get("top_p"),
        "truncation": "disabled",
        "usage": _usage(answer) if answer else None,
    }


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens or 0},
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }


_THOUGHT = (
    b'event: response.reasoning_summary_text.delta\ndata: {"type":"response.reasoning_summary_text.delta",'
    b'"sequence_number":%d,"item_id":"rs_%b","output_index":%d,"summary_index":0,"delta":%b}\n\n'
)
_TEXT = (
    b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta",'
    b'"sequence_number":%d,"item_id":"msg_%b","output_index":%d,"content_index":0,"delta":%b,"logprobs":[]}\n\n'
)


class ResponsesStream:
    """A `Stream` of Responses events: numbered, one item after the other, each closed before the next one opens."""

    def __init__(self, head: Head, request: Request) -> None:
        self._head = head
        self._id = head.id.encode()
        self._request = request
        self._sequence = 0
        self._done: list[dict[str, Any]] = []
        self._open = ""
        self._reasoned: list[str] = []
        self._told: list[str] = []

    def start(self) -> bytes:
        response = _response(self._head, self._request, [])
        return self._event("created", response=response) + self._event("in_progress", response=response)

    def reasoning(self, text: str) -> bytes:
        opened = b"" if self._open == "reasoning" else self._open_reasoning()
        self._reasoned.append(text)
        return opened + self._delta(_THOUGHT, text)

    def text(self, text: str) -> bytes:
        opened = b"" if self._open == "message" else self._close() + self._open_message()
        self._told.append(text)
        return opened + self._delta(_TEXT, text)

    def end(self, answer: Answer) -> bytes:
        said = answer.message
        pieces = []
        if not self._told and (thought := said.reasoning[len("".join(self._reasoned)) :]):
            pieces.append(self.reasoning(thought))
        rest = said.content[len("".join(self._told)) :]
        if rest or not (said.content or said.reasoning or said.tool_calls):
            pieces.append(self.text(rest))
        pieces.append(self._close(_status(answer)))
        pieces += [self._call(item) for item in _call_items(self._head, self._request, said.tool_calls)]
        response = _response(self._head, self._request, self._done, answer)
        pieces.append(self._event(response["status"], response=response))
        return b"".join(pieces)

    def error(self, problem: Problem, message: str) -> bytes:
        code = "context_length_exceeded" if problem is Problem.TOO_LONG else "server_error"
        failed = {"status": "failed", "error": {"code": code, "message": message}}
        return self._event("failed", response=_response(self._head, self._request, self._done) | failed)

    def keep_alive(self) -> bytes:
        return KEEP_ALIVE

    def _open_reasoning(self) -> bytes:
        self._open = "reasoning"
        item = {"id": f"rs_{self._head.id}", "type": "reasoning", "summary": []}
        part = {"item_id": item["id"], "summary_index": 0, "part": _summary("")}
        return self._item("added", item) + self._in_item("reasoning_summary_part.added", part)

    def _open_message(self) -> bytes:
        self._open = "message"
        item = _message_item(self._head, "", "in_progress") | {"content": []}
        part = {"item_id": item["id"], "content_index": 0, "part": _output_text("")}
        return self._item("added", item) + self._in_item("content_part.added", part)

    def _close(self, status: str = "completed") -> bytes:
        """The end of the open item, if one is open."""
        kind, self._open = self._open, ""
        if kind == "reasoning":
            text = "".join(self._reasoned)
            item = _reasoning_item(self._head, self._request, text)
            place = {"item_id": item["id"], "summary_index": 0}
            closing = self._in_item("reasoning_summary_text.done", place | {"text": text})
            closing += self._in_item("reasoning_summary_part.done", place | {"part": _summary(text)})
            return closing + self._finish(item)
        if kind == "message":
            text = "".join(self._told)
            item = _message_item(self._head, text, status)
            place = {"item_id": item["id"], "content_index": 0}
            closing = self._in_item("output_text.done", place | {"text": text, "logprobs": []})
            closing += self._in_item("content_part.done", place | {"part": _output_text(text)})
            return closing + self._finish(item)
        return b""

    def _call(self, item: dict[str, Any]) -> bytes:
        custom = item["type"] == "custom_tool_call"
        name, field = ("custom_tool_call_input", "input") if custom else ("function_call_arguments", "arguments")
        opened = self._item("added", item | {field: "", "status": "in_progress"})
        place = {"item_id": item["id"]}
        delta = self._in_item(f"{name}.delta", place | {"delta": item[field]})
        done = place | {field: item[field]} | ({} if custom else {"name": item["name"]})
        return opened + delta + self._in_item(f"{name}.done", done) + self._finish(item)

    def _finish(self, item: dict[str, Any]) -> bytes:
        told = self._item("done", item)
        self._done.append(item)
        return told

    def _item(self, what: str, item: dict[str, Any]) -> bytes:
        return self._in_item(f"output_item.{what}", {"item": item})

    def _in_item(self, kind: str, fields: dict[str, Any]) -> bytes:
        return self._event(kind, output_index=len(self._done), **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        told = msgspec.json.encode({"type": f"response.{kind}", "sequence_number": self._sequence, **fields})
        self._sequence += 1
        return b"event: response." + kind.encode() + b"\ndata: " + told + b"\n\n"

    def _delta(self, form: bytes, text: str) -> bytes:
        told = form % (self._sequence, self._id, len(self._done), msgspec.json.encode(text))
        self._sequence += 1
        return told


def stream(head: Head, request: Request) -> ResponsesStream:
    return ResponsesStream(head, request)


def error(problem: Problem, message: str) -> bytes:
    return error_body(problem, message, "input")


def counted(tokens: int) -> bytes:
    """The answer to `POST /responses/input_tokens`."""
    return msgspec.json.encode({"object": "response.input_tokens", "input_tokens": tokens})


__all__ = ["NAME", "ResponsesStream", "counted", "decode", "encode", "error", "overflow", "stream"]

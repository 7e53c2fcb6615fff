"""Messages requests: blocks in, one conversation out.

Promises: a history reads the same however its blocks are written: text or one text block, `cache_control` anywhere, the
results of parallel calls in any order. What a model sampled as arguments comes back as it was sampled, reasoning too.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from openforge.chat.arguments import as_sampled
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
    stops_of,
    understood,
)
from openforge.chat.parts import Gathered
from openforge.chat.sealed import given_back
from openforge.chat.transcript import Transcript

_NOT_SAMPLING = frozenset(
    {
        "messages",
        "system",
        "tools",
        "stream",
        "metadata",
        "cache_control",
        "service_tier",
        "container",
        "diagnostics",
        "inference_geo",
        "user_profile_id",
        "workspace_id",
    }
)
_MODES = {"auto": "auto", "any": "required", "tool": "named", "none": "none"}
_REASONING = frozenset({"enabled", "adaptive"})


class _Source(msgspec.Struct):
    type: str = ""
    media_type: str = ""
    data: str = ""
    url: str = ""


class _Block(msgspec.Struct):
    """Any content block: each type has some of the fields."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: msgspec.Raw = msgspec.Raw(b"{}")
    tool_use_id: str | None = None
    content: "str | list[_Block] | dict[str, Any] | None" = None
    is_error: bool | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    tool_name: str | None = None
    source: _Source | str | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Block] | None = None


class _Tool(msgspec.Struct):
    name: str = ""
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    defer_loading: bool | None = None
    strict: bool | None = None


class _Choice(msgspec.Struct):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _Thinking(msgspec.Struct):
    type: str


class _Format(msgspec.Struct):
    type: str = ""
    schema: msgspec.Raw = ABSENT


class _OutputConfig(msgspec.Struct):
    format: _Format | None = None


class _Body(msgspec.Struct):
    """What the codec reads; the rest of the body is only recorded."""

    messages: list[_Message]
    model: str = ""
    system: str | list[_Block] | None = None
    tools: list[_Tool] | None = None
    tool_choice: _Choice | None = None
    stream: bool | None = None
    max_tokens: int | None = None
    stop_sequences: list[str] | None = None
    thinking: _Thinking | None = None
    output_config: _OutputConfig | None = None
    output_format: _Format | None = None
    context_management: msgspec.Raw = ABSENT


_BODY = msgspec.json.Decoder(_Body)


def decode(body: bytes, route: str = "messages") -> Request:
    return understood("Messages", lambda: _request(_BODY.decode(body), fields_of(body)))


def _request(read: _Body, fields: Mapping[str, msgspec.Raw]) -> Request:
    if not read.messages:
        raise BadRequest("messages is empty: send at least one message")
    history = _History()
    tools = history.offer(read.tools or [])
    history.system("system", read.system)
    for index, message in enumerate(read.messages):
        history.add(f"messages[{index}]", message)
    if read.context_management != ABSENT:
        history.notes.append("context_management has no effect: the conversation is taken as it is sent")
    schema, schema_at = _schema(read)
    return Request(
        model=read.model,
        messages=history.log.whole(),
        tools=tools,
        tool_choice=_choice(read.tool_choice, tools),
        parallel_calls=not (read.tool_choice and read.tool_choice.disable_parallel_tool_use),
        schema=schema,
        schema_at=schema_at,
        stream=bool(read.stream),
        reasoning=read.thinking is not None and read.thinking.type in _REASONING,
        max_tokens=least("max_tokens", read.max_tokens),
        stop=stops_of("stop_sequences", read.stop_sequences),
        asked=recorded(fields, _NOT_SAMPLING),
        beside=beside(fields),
        notes=tuple(history.notes),
        pictures=history.pictures,
    )


class _History:
    """The canonical messages of a conversation, gathered block by block."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.pictures: dict[str, bytes] = {}
        self.log = Transcript()
        self._deferred: dict[str, Tool] = {}

    def offer(self, tools: Sequence[_Tool]) -> tuple[Tool, ...]:
        """The tools that the prompt describes. Deferred ones are described where a result refers to them."""
        kept = []
        for index, tool in enumerate(tools):
            if tool.type not in (None, "custom"):
                self.notes.append(not_offered(f"tools[{index}]", tool.type))
                continue
            if not tool.name:
                raise BadRequest(f"tools[{index}].name is missing: give the tool a name")
            offered = Tool(
                name=tool.name,
                description=tool.description or "",
                parameters=tool.input_schema or {},
                strict=bool(tool.strict),
            )
            if tool.defer_loading:
                self._deferred[tool.name] = offered
            else:
                kept.append(offered)
        return tuple(kept)

    def system(self, where: str, content: str | list[_Block] | None) -> None:
        if content:
            self.log.put(self._gathered("system", where, content).message())

    def add(self, where: str, message: _Message) -> None:
        match message.role:
            case "user":
                self._user(where, message.content)
            case "assistant":
                self._assistant(where, message.content)
            case "system":
                self.system(where, message.content)
            case _:
                raise BadRequest(f"{where}.role = {message.role!r} is unknown: use user, assistant or system")

    def _user(self, where: str, content: str | list[_Block] | None) -> None:
        if content is None or isinstance(content, str):
            self.log.put(Message(role="user", content=content or ""))
            return
        others = []
        for index, block in enumerate(content):
            if block.type == "tool_result":
                self.log.result(self._result(f"{where}.content[{index}]", block))
            else:
                others.append(block)
        if others or not content:
            self.log.put(self._gathered("user", where, others).message())

    def _result(self, where: str, block: _Block) -> Message:
        if not block.tool_use_id:
            raise BadRequest(f"{where}.tool_use_id is missing: say which call this is the result of")
        if isinstance(block.content, dict):
            raise BadRequest(f"{where}.content is an object: send text or a list of blocks")
        gathered = self._gathered("tool", where, block.content or "")
        return gathered.message(tool_call_id=block.tool_use_id, otherwise="error" if block.is_error else "")

    def _assistant(self, where: str, content: str | list[_Block] | None) -> None:
        texts: list[str] = []
        reasoning: list[str] = []
        calls: list[ToolCall] = []
        blocks = [_Block("text", content)] if isinstance(content, str) else content or []
        for index, block in enumerate(blocks):
            match block.type:
                case "text":
                    texts.append(block.text or "")
                case "thinking":
                    reasoning.append(given_back(block.thinking or "", block.signature or ""))
                case "redacted_thinking":
                    reasoning.append(given_back("", block.data or ""))
                case "tool_use":
                    calls.append(_call(f"{where}.content[{index}]", block, len(calls)))
                case _:
                    self.notes.append(f"{where}.content[{index}] of type {block.type!r} is left out: it is not ours")
        before = self.log.reopened()
        self.log.say(
            Message(
                role="assistant",
                content=before.content + "".join(texts),
                reasoning=before.reasoning + "".join(reasoning),
                tool_calls=(*before.tool_calls, *calls),
            )
        )

    def _gathered(self, role: str, where: str, content: str | Sequence[_Block]) -> Gathered:
        gathered = Gathered(role)
        for index, block in enumerate([_Block("text", content)] if isinstance(content, str) else content):
            self._gather(gathered, role, f"{where}.content[{index}]", block)
        self.pictures |= gathered.pictures
        return gathered

    def _gather(self, gathered: Gathered, role: str, where: str, block: _Block) -> None:
        match block.type:
            case "text":
                gathered.write(block.text or "")
            case "image":
                _show(gathered, where, block.source)
            case "tool_reference":
                gathered.write(self._referred(where, block.tool_name or ""))
            case "document" if isinstance(block.source, _Source) and block.source.type == "text":
                gathered.write(block.source.data)
            case "search_result" if isinstance(block.content, list):
                for index, inner in enumerate(block.content):
                    self._gather(gathered, role, f"{where}.content[{index}]", inner)
            case _ if role == "tool":
                self.notes.append(f"{where} of type {block.type!r} is left out: this model reads text and images")
                gathered.write(f"[{block.type}: this model reads text and images]")
            case _:
                raise BadRequest(f"{where} has type {block.type!r}: this model reads text and images")

    def _referred(self, where: str, name: str) -> str:
        """What a result that refers to a deferred tool stands for."""
        tool = self._deferred.get(name)
        if tool is None:
            self.notes.append(f"{where} refers to {name!r}, which is no deferred tool: it is left out")
            return ""
        shown = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
        return msgspec.json.encode(shown).decode()


def _show(gathered: Gathered, where: str, source: _Source | str | None) -> None:
    if not isinstance(source, _Source):
        raise BadRequest(f"{where}.source is missing: send the image as base64 or by URL")
    if source.type == "url":
        gathered.show_url(f"{where}.source.url", source.url)
    elif source.type == "base64":
        gathered.show_base64(f"{where}.source.data", source.media_type, source.data)
    else:
        raise BadRequest(f"{where}.source.type = {source.type!r} is not read: send the image as base64 or by URL")


def _call(where: str, block: _Block, position: int) -> ToolCall:
    if not block.name:
        raise BadRequest(f"{where}.name is missing: say which tool was called")
    return ToolCall(id=block.id or f"call_{position}", name=block.name, arguments=as_sampled(bytes(block.input)))


def _choice(choice: _Choice | None, tools: Sequence[Tool]) -> ToolChoice:
    if choice is None:
        return ToolChoice()
    mode = _MODES.get(choice.type)
    if mode is None:
        raise BadRequest(f"tool_choice.type = {choice.type!r} is unknown: use one of {', '.join(_MODES)}")
    if mode != "named":
        return ToolChoice(mode)  # type: ignore[arg-type]
    return choice_of("tool_choice", "named", [choice.name or ""], tools)


def _schema(read: _Body) -> tuple[bytes, str]:
    """The answer's schema, and where it stood."""
    config = read.output_config.format if read.output_config else None
    for form, field in ((config, "output_config.format.schema"), (read.output_format, "output_format.schema")):
        if form is not None and form.type == "json_schema" and form.schema != ABSENT:
            return bytes(form.schema), field
    return b"", ""

"""Gemini requests: contents in, one conversation out.

Promises: a history reads the same whether an answer comes back as one content or as the pieces in which it was
streamed, and in whatever order the results of parallel calls stand. A thought signature brings the reasoning back also
where the harness dropped the thoughts.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from openforge.chat.arguments import as_sampled
from openforge.chat.contract import Message, Tool, ToolCall
from openforge.chat.dialect import BadRequest, Request, ToolChoice
from openforge.chat.fields import ABSENT, choice_of, fields_of, least, not_offered, recorded, stops_of, understood
from openforge.chat.parts import Gathered
from openforge.chat.sealed import given_back
from openforge.chat.transcript import Transcript

_NOT_SAMPLING = frozenset({"contents", "systemInstruction", "tools", "model", "labels", "generateContentRequest"})
_MODES = {"AUTO": "auto", "ANY": "required", "NONE": "none", "VALIDATED": "auto", "MODE_UNSPECIFIED": "auto"}
_ANY_OBJECT = b'{"type":"object"}'


class _Blob(msgspec.Struct, rename="camel"):
    mime_type: str = ""
    data: str = ""


class _FunctionCall(msgspec.Struct):
    name: str
    args: msgspec.Raw = msgspec.Raw(b"{}")
    id: str | None = None


class _ResponsePart(msgspec.Struct, rename="camel"):
    inline_data: _Blob | None = None


class _FunctionResponse(msgspec.Struct):
    name: str = ""
    response: msgspec.Raw = msgspec.Raw(b"{}")
    id: str | None = None
    parts: list[_ResponsePart] | None = None


class _Part(msgspec.Struct, rename="camel"):
    text: str | None = None
    thought: bool | None = None
    thought_signature: str | None = None
    function_call: _FunctionCall | None = None
    function_response: _FunctionResponse | None = None
    inline_data: _Blob | None = None


class _Content(msgspec.Struct):
    parts: list[_Part] | None = None
    role: str | None = None


class _Declaration(msgspec.Struct, rename="camel"):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    parameters_json_schema: dict[str, Any] | None = None


class _CallingConfig(msgspec.Struct, rename="camel"):
    mode: str | None = None
    allowed_function_names: list[str] | None = None


class _ToolConfig(msgspec.Struct, rename="camel"):
    function_calling_config: _CallingConfig | None = None


class _ThinkingConfig(msgspec.Struct, rename="camel"):
    include_thoughts: bool | None = None


class _GenerationConfig(msgspec.Struct, rename="camel"):
    max_output_tokens: int | None = None
    stop_sequences: list[str] | None = None
    candidate_count: int | None = None
    response_mime_type: str | None = None
    response_schema: dict[str, Any] | None = None
    response_json_schema: msgspec.Raw = ABSENT
    thinking_config: _ThinkingConfig | None = None


class _Body(msgspec.Struct, rename="camel"):
    """What the codec reads; the rest of the body is only recorded."""

    contents: list[_Content] | None = None
    system_instruction: _Content | str | None = None
    tools: list[dict[str, msgspec.Raw]] | None = None
    tool_config: _ToolConfig | None = None
    generation_config: _GenerationConfig | None = None
    cached_content: str | None = None
    generate_content_request: msgspec.Raw = ABSENT


_BODY = msgspec.json.Decoder(_Body)
_DECLARATIONS = msgspec.json.Decoder(list[_Declaration])
_ROUTE = re.compile(r"(?:v1beta/)?models/(?P<model>.+):(?P<method>\w+)(?:\?(?P<query>.*))?")


def decode(body: bytes, route: str = "v1beta/models/m:generateContent") -> Request:
    asked_for = _ROUTE.fullmatch(route)
    if asked_for is None:
        raise BadRequest(f"{route} names no model: post to v1beta/models/MODEL:generateContent")
    model, method, query = asked_for["model"], asked_for["method"], asked_for["query"] or ""
    return understood("Gemini", lambda: _request(_camel_case(body), model, method, query))


def _request(body: bytes, model: str, method: str, query: str) -> Request:
    read = _BODY.decode(body)
    if method == "countTokens" and read.generate_content_request != ABSENT:
        return _request(bytes(read.generate_content_request), model, method, query)
    asked = recorded(fields_of(body), _NOT_SAMPLING)
    if not read.contents:
        raise BadRequest("contents is empty: send at least one content")
    if read.cached_content:
        raise BadRequest(f"cachedContent = {read.cached_content!r} is not here: send the whole conversation")
    config = read.generation_config or _GenerationConfig()
    if config.candidate_count not in (None, 1):
        raise BadRequest(f"generationConfig.candidateCount = {config.candidate_count}: ask for 1, or leave it out")
    tools, notes = _tools(read.tools or [])
    history = _History()
    history.system(read.system_instruction)
    for index, content in enumerate(read.contents):
        history.add(f"contents[{index}]", content)
    schema, schema_at = _schema(config)
    return Request(
        model=model,
        messages=history.log.whole(),
        tools=tools,
        tool_choice=_choice(read.tool_config, tools),
        schema=schema,
        schema_at=schema_at,
        stream=method == "streamGenerateContent",
        events="alt=sse" in query.split("&"),
        reasoning=bool(config.thinking_config and config.thinking_config.include_thoughts),
        max_tokens=least("generationConfig.maxOutputTokens", config.max_output_tokens),
        stop=stops_of("generationConfig.stopSequences", config.stop_sequences),
        asked={"model": model, **asked},
        notes=notes,
        pictures=history.pictures,
    )


class _History:
    """The canonical messages of a conversation, gathered part by part."""

    def __init__(self) -> None:
        self.pictures: dict[str, bytes] = {}
        self.log = Transcript()
        self._answered: set[str] = set()
        self._unnamed = 0

    def system(self, content: _Content | str | None) -> None:
        parts = [_Part(text=content)] if isinstance(content, str) else (content.parts if content else None) or []
        if text := "\n".join(part.text for part in parts if part.text):
            self.log.put(Message(role="system", content=text))

    def add(self, where: str, content: _Content) -> None:
        match content.role:
            case "model":
                self._model(where, content.parts or [])
            case "user" | "function" | "tool" | None:
                self._user(where, content.parts or [])
            case _:
                raise BadRequest(f"{where}.role = {content.role!r} is unknown: use user or model")

    def _model(self, where: str, parts: Sequence[_Part]) -> None:
        texts: list[str] = []
        thoughts: list[str] = []
        sealed = ""
        calls: list[ToolCall] = []
        for index, part in enumerate(parts):
            sealed = sealed or part.thought_signature or ""
            if part.function_call is not None:
                calls.append(self._call(part.function_call))
            elif part.text is not None:
                (thoughts if part.thought else texts).append(part.text)
            elif part.thought_signature is None:
                raise BadRequest(
                    f"{where}.parts[{index}] is neither text nor a function call: a model says no more here"
                )
        self._say("".join(texts), "".join(thoughts), sealed, tuple(calls))

    def _call(self, call: _FunctionCall) -> ToolCall:
        self._unnamed += 1
        return ToolCall(id=call.id or f"call_{self._unnamed}", name=call.name, arguments=as_sampled(bytes(call.args)))

    def _say(self, text: str, thoughts: str, sealed: str, calls: tuple[ToolCall, ...]) -> None:
        """Contents of the model in a row are one answer, which came in pieces."""
        before = self.log.reopened()
        self.log.say(
            Message(
                role="assistant",
                content=before.content + text,
                reasoning=given_back(before.reasoning + thoughts, sealed),
                tool_calls=before.tool_calls + calls,
            )
        )
        self._answered = set()

    def _user(self, where: str, parts: Sequence[_Part]) -> None:
        gathered = Gathered("user")
        others = False
        for index, part in enumerate(parts):
            place = f"{where}.parts[{index}]"
            if part.function_response is not None:
                self.log.result(self._result(place, part.function_response))
                continue
            others = True
            if part.inline_data is not None:
                _show(gathered, place, part.inline_data)
            elif part.text is not None:
                gathered.write(part.text)
            else:
                raise BadRequest(f"{place} is neither text, image nor function response: this model reads no more")
        if others or not parts:
            self.pictures |= gathered.pictures
            self.log.put(gathered.message())

    def _result(self, where: str, told: _FunctionResponse) -> Message:
        """Images stand before the text."""
        gathered = Gathered("tool")
        for index, part in enumerate(told.parts or []):
            if part.inline_data is not None:
                _show(gathered, f"{where}.parts[{index}]", part.inline_data)
        gathered.write(_result_text(told.response))
        self.pictures |= gathered.pictures
        call_id = self._answers(told)
        self._answered.add(call_id)
        return gathered.message(tool_call_id=call_id)

    def _answers(self, told: _FunctionResponse) -> str:
        """The id of the call that a result belongs to: as it says, else the first open one of that name."""
        if told.id and any(call.id == told.id for call in self.log.calls):
            return told.id
        named = (call.id for call in self.log.calls if call.name == told.name and call.id not in self._answered)
        return next(named, told.id or told.name)


def _show(gathered: Gathered, where: str, blob: _Blob) -> None:
    if not blob.mime_type.startswith("image/"):
        raise BadRequest(f"{where}.inlineData.mimeType = {blob.mime_type!r}: this model reads text and images")
    gathered.show_base64(f"{where}.inlineData.data", blob.mime_type, blob.data)


def _result_text(response: bytes) -> str:
    """A response that is one text as the text, any other as JSON."""
    value = msgspec.json.decode(response)
    match value:
        case {"output": str(text), **others} if not others:
            return text
        case {"result": str(text), **others} if not others:
            return text
    return msgspec.json.encode(value).decode()


def _tools(tools: Sequence[Mapping[str, msgspec.Raw]]) -> tuple[tuple[Tool, ...], tuple[str, ...]]:
    kept: list[Tool] = []
    notes: list[str] = []
    for index, tool in enumerate(tools):
        for kind, value in tool.items():
            if kind == "functionDeclarations":
                kept += [_tool(declared) for declared in _DECLARATIONS.decode(value)]
            else:
                notes.append(not_offered(f"tools[{index}]", kind))
    return tuple(kept), tuple(notes)


def _tool(declared: _Declaration) -> Tool:
    schema = declared.parameters_json_schema
    if schema is None:
        schema = _json_schema(declared.parameters or {})
    return Tool(name=declared.name, description=declared.description or "", parameters=schema)


def _json_schema(schema: Any) -> Any:
    """The dialect's own schemas, which are those of OpenAPI with types in capitals, as JSON schemas."""
    if isinstance(schema, list):
        return [_json_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    told = {key: value for key, value in schema.items() if key not in ("nullable", "propertyOrdering", "type")}
    for key, value in told.items():
        if key in ("properties", "$defs") and isinstance(value, dict):
            told[key] = {name: _json_schema(inner) for name, inner in value.items()}
        elif key in ("items", "anyOf", "additionalProperties"):
            told[key] = _json_schema(value)
        elif key.startswith(("min", "max")) and isinstance(value, str) and value.isdecimal():
            told[key] = int(value)
    if isinstance(kind := schema.get("type"), str):
        told = {"type": [kind.lower(), "null"] if schema.get("nullable") is True else kind.lower(), **told}
    return told


def _choice(config: _ToolConfig | None, tools: Sequence[Tool]) -> ToolChoice:
    calling = (config.function_calling_config if config else None) or _CallingConfig()
    mode = _MODES.get(calling.mode or "AUTO")
    if mode is None:
        raise BadRequest(
            f"toolConfig.functionCallingConfig.mode = {calling.mode!r} is unknown: use one of {', '.join(_MODES)}"
        )
    if mode != "required" or not calling.allowed_function_names:
        return ToolChoice(mode)  # type: ignore[arg-type]
    field = "toolConfig.functionCallingConfig.allowedFunctionNames"
    return choice_of(field, "named", calling.allowed_function_names, tools)


def _schema(config: _GenerationConfig) -> tuple[bytes, str]:
    """The answer's schema, and where it stood. JSON without a schema is any object, as in Chat Completions."""
    if config.response_json_schema != ABSENT:
        return bytes(config.response_json_schema), "generationConfig.responseJsonSchema"
    if config.response_schema is not None:
        return msgspec.json.encode(_json_schema(config.response_schema)), "generationConfig.responseSchema"
    if config.response_mime_type == "application/json":
        return _ANY_OBJECT, "generationConfig.responseMimeType"
    return b"", ""


_SNAKE = (
    "allowed_function_names",
    "cached_content",
    "candidate_count",
    "function_call",
    "function_calling_config",
    "function_declarations",
    "function_response",
    "generate_content_request",
    "generation_config",
    "include_thoughts",
    "inline_data",
    "max_output_tokens",
    "mime_type",
    "parameters_json_schema",
    "response_json_schema",
    "response_mime_type",
    "response_schema",
    "stop_sequences",
    "system_instruction",
    "thinking_config",
    "thought_signature",
    "tool_config",
)
_CAMEL = {name: re.sub(r"_(\w)", lambda letter: letter[1].upper(), name) for name in _SNAKE}
_ANY_SNAKE = re.compile(rb'"(?:' + "|".join(_SNAKE).encode() + rb')"\s*:')
_OPAQUE = frozenset({"args", "response", "parameters", "parametersJsonSchema", "responseSchema", "responseJsonSchema"})


def _camel_case(body: bytes) -> bytes:
    """Field names in camel case: a server of this dialect also reads the names of the protocol buffers."""
    if _ANY_SNAKE.search(body) is None:
        return body
    return msgspec.json.encode(_camel_names(msgspec.json.decode(body)))


def _camel_names(value: Any) -> Any:
    if isinstance(value, list):
        return [_camel_names(item) for item in value]
    if not isinstance(value, dict):
        return value
    named = ((_CAMEL.get(key, key), item) for key, item in value.items())
    return {key: item if key in _OPAQUE else _camel_names(item) for key, item in named}

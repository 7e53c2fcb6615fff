"""What Chat Completions and Responses have in common: content, custom tools, choices, schemas, errors.

Promises: what a model sampled for a custom tool comes back as the same arguments, also where they were not
`{"input": text}`.
"""

import msgspec

from openforge.chat.contract import CUSTOM_PARAMETERS, Tool, ToolCall
from openforge.chat.dialect import BadRequest, Problem, ToolChoice
from openforge.chat.parts import Gathered

_ANY_OBJECT = b'{"type":"object"}'
_RAW = "raw"
"""Ends the id of a call to a custom tool whose arguments hold no `input`: its text is the arguments as they are."""


class _CustomInput(msgspec.Struct, forbid_unknown_fields=True):
    input: str


_INPUT = msgspec.json.Decoder(_CustomInput)


# -- what a message says


class ImageUrl(msgspec.Struct):
    url: str


class Part(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: ImageUrl | str | None = None
    file_id: str | None = None


Content = str | list[Part] | None


def gathered_from(where: str, role: str, content: Content) -> Gathered:
    gathered = Gathered(role)
    if content is None or isinstance(content, str):
        gathered.write(content or "")
        return gathered
    for index, part in enumerate(content):
        url = part.image_url.url if isinstance(part.image_url, ImageUrl) else part.image_url
        if url or part.file_id:
            gathered.show_url(f"{where}.content[{index}].image_url", url or f"file:{part.file_id}")
        elif part.text is not None or part.refusal is not None:
            gathered.write(part.text or part.refusal or "")
        else:
            raise BadRequest(f"{where} has a part of type {part.type!r}: this model reads text and images")
    return gathered


# -- custom tools


class CustomFormat(msgspec.Struct):
    """What the text of a custom tool has to be: anything, or what a grammar allows."""

    type: str = "text"
    syntax: str | None = None
    definition: str | None = None


def custom_tool(name: str, description: str, form: CustomFormat | None, namespace: str = "") -> Tool:
    """The model is told the grammar in words: it is not enforced."""
    if form is not None and form.definition:
        description += f"\n\nThe input has to match this grammar ({form.syntax or 'lark'}):\n{form.definition}"
    return Tool(
        name=f"{namespace}.{name}" if namespace else name,
        description=description.strip(),
        parameters=CUSTOM_PARAMETERS,
        kind="custom",
        namespace=namespace,
    )


def told_input(call: ToolCall) -> tuple[str, str]:
    """Id and text with which a call to a custom tool is told."""
    try:
        return call.id, _INPUT.decode(call.arguments).input
    except (msgspec.MsgspecError, RecursionError):
        return call.id + _RAW, call.arguments


def sampled_arguments(call_id: str, text: str) -> str:
    """The arguments behind what `told_input` told."""
    return text if call_id.endswith(_RAW) else msgspec.json.encode({"input": text}).decode()


# -- what is asked for

NOT_SAMPLING = frozenset(
    {
        "tools",
        "stream",
        "stream_options",
        "metadata",
        "client_metadata",
        "user",
        "safety_identifier",
        "store",
        "service_tier",
        "prompt_cache_key",
        "prompt_cache_retention",
    }
)
"""The fields of both dialects that do not change what is sampled, or are compared by themselves."""


def choice_in_a_word(choice: str | None) -> ToolChoice:
    if choice not in (None, "auto", "none", "required"):
        raise BadRequest(f"tool_choice = {choice!r} is unknown: use auto, none, required, or name a tool")
    return ToolChoice(choice or "auto")  # type: ignore[arg-type]


def schema_of(field: str, kind: str, schema: msgspec.Raw) -> bytes:
    """What an answer has to match: nothing for `text`, any object for `json_object`."""
    match kind:
        case "text":
            return b""
        case "json_object":
            return _ANY_OBJECT
        case "json_schema" if bytes(schema)[:1] == b"{":
            return bytes(schema)
        case "json_schema":
            raise BadRequest(f"{field} has no schema: send a JSON schema")
    raise BadRequest(f"{field}.type = {kind!r} is unknown: use text, json_object or json_schema")


# -- errors

_TYPES = {
    Problem.UNKNOWN_KEY: ("authentication_error", "invalid_api_key"),
    Problem.TOO_LONG: ("invalid_request_error", "context_length_exceeded"),
    Problem.OUT_OF_TURNS: ("invalid_request_error", "turn_limit_reached"),
    Problem.ENDED: ("invalid_request_error", "attempt_ended"),
    Problem.ENGINE_FAILED: ("server_error", "engine_failed"),
}


def error_body(problem: Problem, message: str, prompt_field: str) -> bytes:
    kind, code = _TYPES.get(problem, ("invalid_request_error", None))
    param = prompt_field if problem is Problem.TOO_LONG else None
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def overflow(prompt_tokens: int, window: int) -> str:
    """The words at which harnesses of both dialects compact."""
    return (
        f"This model's maximum context length is {window} tokens. However, your request has {prompt_tokens} "
        "input tokens. Please reduce the length of the messages."
    )

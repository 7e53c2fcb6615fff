"""Arguments of tool calls for dialects that carry them as JSON objects.

Promises: what a model sampled and what a harness gives back are the same arguments, also where they are no JSON; what
goes out is always an object.
"""

import msgspec

INVALID = "INVALID_JSON"
"""The key under which text that is no JSON object travels, as the Messages documentation advises for such text."""

_OBJECT = msgspec.json.Decoder(dict[str, object])
_WRAPPED = msgspec.json.Decoder(dict[str, str])
_WRAPPER = b'"' + INVALID.encode() + b'"'


def as_object(arguments: str) -> msgspec.Raw:
    """The sampled text if it is a JSON object, else an object that holds the text."""
    if not arguments:
        return msgspec.Raw(b"{}")
    if _is_object(arguments):
        return msgspec.Raw(arguments.encode())
    return msgspec.Raw(msgspec.json.encode({INVALID: arguments}))


def as_sampled(told: bytes) -> str:
    """The arguments in what a harness gave back. Raises `UnicodeDecodeError`."""
    text = told.decode()
    if _WRAPPER in told[:64]:
        try:
            wrapped = _WRAPPED.decode(told)
        except msgspec.MsgspecError:
            return text
        if wrapped.keys() == {INVALID} and not _is_object(wrapped[INVALID]):
            return wrapped[INVALID]
    return text


def _is_object(text: str) -> bool:
    try:
        _OBJECT.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return False
    return True

"""What is said of a value in a run file that is not of the kind that belongs there."""

import difflib
import json
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec


def shown(value: object) -> str:
    """A value as a person would write it in the run file, cut where it is long."""
    try:
        text = json.dumps(value, ensure_ascii=False) if isinstance(value, (str, bool)) else str(value)
    except ValueError:  # Python writes no number of more than 4300 digits
        text = "a number of thousands of digits"
    return text if len(text) <= 80 else text[:77] + "..."


def mismatch(path: str, said: Any, wanted: Any) -> Iterator[str]:
    """At most one sentence: why what was said of `path` is no value of the type `wanted`, and what to write."""
    try:
        msgspec.convert(said, wanted)
    except msgspec.ValidationError as error:
        yield f"{path} = {shown(said)} {_way_out(said, wanted, str(error))}"
        return
    if not all(writable(text) for text in _texts(said)):
        yield f"{path} = {shown(said)} holds a character that no file or message can: write plain text"


def _texts(said: Any) -> Iterator[str]:
    if isinstance(said, str):
        yield said
    elif isinstance(said, (list, tuple)):
        for inner in said:
            yield from _texts(inner)
    elif isinstance(said, dict):
        for name, inner in said.items():
            yield name
            yield from _texts(inner)


def writable(text: str) -> bool:
    """Into a file or a message. Half a surrogate pair is of a shell that is not UTF-8; a zero byte ends every path."""
    return "\0" not in text and not any("\ud800" <= character <= "\udfff" for character in text)


def _way_out(said: Any, wanted: Any, error: str) -> str:
    if typing.get_origin(wanted) is Literal:
        known = [str(choice) for choice in typing.get_args(wanted)]
        close = difflib.get_close_matches(str(said), known, n=1)
        hint = f"; did you mean {shown(close[0])}?" if close else ""
        return f"is none of {', '.join(shown(choice) for choice in known)}{hint}"
    return f"is not {_described(wanted, error)}: write for example {example(wanted)}"


def _described(wanted: Any, error: str) -> str:
    if typing.get_origin(wanted) is Annotated:
        kind, *bounds = typing.get_args(wanted)
        least = [f" of {one.ge} or more" for one in bounds if isinstance(one, msgspec.Meta) and one.ge is not None]
        return _described(kind, error) + "".join(least)
    plain = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    if wanted in plain:
        return plain[wanted]
    if typing.get_origin(wanted) is tuple:
        kinds = [kind for kind in typing.get_args(wanted) if kind is not Ellipsis]
        fixed = "" if Ellipsis in typing.get_args(wanted) else f"{len(kinds)} "
        return f"a list of {fixed}{'texts' if kinds[0] is str else 'numbers'}"
    if typing.get_origin(wanted) in (typing.Union, types.UnionType):
        return " or ".join(_described(kind, error) for kind in typing.get_args(wanted) if kind is not types.NoneType)
    return f"what it should be ({error})"


def example(wanted: Any) -> str:
    plain = {int: "1", float: "0.5", str: '"text"', bool: "true"}
    if wanted in plain:
        return plain[wanted]
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is Annotated:
        return example(arguments[0])
    if origin is tuple:
        return '["text"]' if arguments[0] is str else "[0.9, 0.95]"
    if origin is dict:
        return '{name = "text"}'
    if origin in (typing.Union, types.UnionType):
        return example(arguments[0])
    return "a value"

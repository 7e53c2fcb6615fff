"""What every dialect reads alike: the fields that are recorded, limits, stop strings, tool choices.

Promises: what is out of bounds is refused with field, value and way out.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from openforge.chat.contract import Tool, ToolChoice
from openforge.chat.dialect import BadRequest, Request

ABSENT = msgspec.Raw(b"null")
"""A field that is not there, or null, where its JSON is taken as it is."""
_UNREADABLE = (msgspec.MsgspecError, UnicodeError, RecursionError)
_MOST_STOPS = 16
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_BESIDE = ("prompt_cache_key", "metadata", "client_metadata", "system")


def understood(dialect: str, read: Callable[[], Request]) -> Request:
    """The request that `read` makes of a body. Raises `BadRequest`, also where the body cannot be read."""
    try:
        return read()
    except _UNREADABLE as error:
        raise BadRequest(f"the body is not a {dialect} request: {error}") from error


def fields_of(body: bytes) -> dict[str, msgspec.Raw]:
    """The fields of a body, as they stand there; in what is `understood`."""
    return _FIELDS.decode(body)


def recorded(fields: Mapping[str, msgspec.Raw], but: Collection[str]) -> dict[str, Any]:
    """The fields without those in `but`; in what is `understood`."""
    return {name: msgspec.json.decode(raw) for name, raw in fields.items() if name not in but}


def beside(fields: Mapping[str, msgspec.Raw]) -> dict[str, msgspec.Raw]:
    """Those in which harnesses say who they are."""
    return {name: fields[name] for name in _BESIDE if name in fields}


def role_of(where: str, role: str, roles: Mapping[str, str]) -> str:
    """What a role of a dialect is in `roles`."""
    if role not in roles:
        raise BadRequest(f"{where}.role = {role!r} is unknown: use one of {', '.join(roles)}")
    return roles[role]


def least(field: str, *limits: int | None) -> int | None:
    """The smallest of the token limits."""
    given = [limit for limit in limits if limit is not None]
    if any(limit < 1 for limit in given):
        raise BadRequest(f"{field} = {min(given)} is too small: ask for at least 1, or leave it out")
    return min(given, default=None)


def stops_of(field: str, stops: Sequence[str] | None) -> tuple[str, ...]:
    if stops and len(stops) > _MOST_STOPS:
        raise BadRequest(f"{field} has {len(stops)} strings: send at most {_MOST_STOPS}")
    return tuple(text for text in stops or () if text)


def choice_of(field: str, mode: str, names: Iterable[str], tools: Sequence[Tool]) -> ToolChoice:
    """A tool choice with names of this request's tools, in their namespace or without it."""
    known = {tool.told_name: tool.name for tool in tools} | {tool.name: tool.name for tool in tools}
    for name in names:
        if name not in known:
            raise BadRequest(f"{field} names {name!r}, which is no tool of this request: name one of tools")
    return ToolChoice(mode, tuple(dict.fromkeys(known[name] for name in names)))  # type: ignore[arg-type]


def not_offered(where: str, kind: str) -> str:
    """The note of a tool that is left out."""
    return f"{where} of type {kind!r} is not offered: nobody here would run it"

"""Settings of a service: one frozen Struct, one environment variable for each field.

Promises: all that is wrong is named at once, by variable, value and way out.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from openforge.bus.settings import BadSettings

S = TypeVar("S", bound=msgspec.Struct)
PREFIX = "OPENFORGE_"


def settings_from_env(settings: type[S], env: Mapping[str, str] | None = None) -> S:
    """Field `max_lag` is `OPENFORGE_MAX_LAG`; tuples and lists are comma-separated. Raises `BadSettings`."""
    env = os.environ if env is None else env
    values: dict[str, Any] = {}
    wrong: list[str] = []
    for field in msgspec.structs.fields(settings):
        name = PREFIX + field.name.upper()
        text = env.get(name)
        if text is None or (text == "" and not field.required):
            if field.required:
                wrong.append(f"{name} is not set: set it ({_wanted(field.type)})")
            continue
        try:
            values[field.name] = _convert(text, field.type)
        except (msgspec.ValidationError, ValueError) as error:
            wrong.append(f"{name} = {text!r} is not {_wanted(field.type)} ({error}): change it")
    if wrong:
        raise BadSettings("; ".join(wrong))
    return settings(**values)


def _convert(text: str, kind: Any) -> Any:
    origin = getattr(kind, "__origin__", None)
    raw = [part.strip() for part in text.split(",") if part.strip()] if origin in (tuple, list) else text
    return msgspec.convert(raw, kind, strict=False, dec_hook=_to_path)


def _to_path(kind: type, value: Any) -> Any:
    if issubclass(kind, Path):
        return Path(value)
    raise NotImplementedError(f"a setting cannot be of type {kind}")


def _wanted(kind: Any) -> str:
    return {str: "a text", int: "a whole number", float: "a number", bool: "true or false", Path: "a path"}.get(
        kind, str(kind)
    )

"""Plain classes from plain dicts."""

import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

T = TypeVar("T")


def made(kind: type[T], said: Mapping[str, Any]) -> T:
    """A dataclass from what `said` has of its fields; what it has beside them is left out."""
    hints = typing.get_type_hints(kind)
    known = {one.name for one in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: _value(hints[name], value) for name, value in said.items() if name in known})


def _value(hint: Any, value: Any) -> Any:
    if is_dataclass(hint) and isinstance(value, Mapping):
        return made(hint, value)  # type: ignore[arg-type]
    if typing.get_origin(hint) is list and isinstance(value, list):
        inner = (typing.get_args(hint) or (Any,))[0]
        return [_value(inner, item) for item in value]
    return value

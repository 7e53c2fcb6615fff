"""Fills `{{name}}` in texts and file names: plain replacement, no expressions, nothing evaluated."""

import re
from collections.abc import Mapping

_PLACEHOLDER = re.compile(r"\{\{[ ]*([A-Za-z_][A-Za-z0-9_]*)[ ]*\}\}")

Variables = Mapping[str, str]


class UnknownVariable(LookupError):
    """A placeholder names a variable that was not drawn."""


def fill(text: str, variables: Variables) -> str:
    """`text` with every `{{name}}` replaced; raises `UnknownVariable`."""

    def value(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in variables:
            known = ", ".join(sorted(variables)) or "none"
            raise UnknownVariable(f"{match.group(0)} names no variable: there are {known}")
        return variables[name]

    return _PLACEHOLDER.sub(value, text)


def fill_bytes(content: bytes, variables: Variables) -> bytes:
    """The same for a file; what is not UTF-8 text is left as it is."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return content
    return fill(text, variables).encode()

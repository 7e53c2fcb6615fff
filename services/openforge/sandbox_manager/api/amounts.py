"""Amounts as Kubernetes writes them: `"4"`, `"2000m"` of CPU, `"16Gi"` of memory."""

import re

_AMOUNT = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)(m|k|Ki|M|Mi|G|Gi|T|Ti)?")
_UNITS = {
    "": 1.0,
    "m": 1e-3,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}


def amount(field: str, text: str) -> float:
    """Raises `ValueError` naming the field."""
    matched = _AMOUNT.fullmatch(text.strip())
    value = float(matched[1]) * _UNITS[matched[2] or ""] if matched else 0.0
    if value <= 0:
        raise ValueError(f"{field} = {text!r}: write an amount above zero, as in '2000m', '4' or '16Gi'")
    return value

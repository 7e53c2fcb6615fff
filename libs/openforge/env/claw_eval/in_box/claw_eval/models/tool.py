"""Tools and where they lead."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class ToolSpec:
    name: str
    description: str = ""
    input_schema: dict[str, Any] = field(default_factory=dict)


@dataclass
class ToolEndpoint:
    tool_name: str
    url: str
    method: str = "POST"

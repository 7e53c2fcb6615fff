"""Messages of a conversation, made of blocks as ClawEval has them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class TextBlock:
    text: str
    type: str = "text"


@dataclass
class ToolUseBlock:
    id: str
    name: str
    input: dict[str, Any] = field(default_factory=dict)
    type: str = "tool_use"


@dataclass
class ToolResultBlock:
    tool_use_id: str
    content: list[TextBlock] = field(default_factory=list)
    is_error: bool = False
    type: str = "tool_result"


@dataclass
class Message:
    role: str
    content: list[Any] = field(default_factory=list)
    reasoning_content: str = ""

    @property
    def text(self) -> str:
        return "\n".join(block.text for block in self.content if block.type == "text")

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> "Message":
        """From a recorded message: results of tools are a user's, as ClawEval has it."""
        text = str(said.get("content") or "")
        if said["role"] == "tool":
            return cls("user", [ToolResultBlock(str(said.get("tool_call_id") or ""), [TextBlock(text)])])
        blocks: list[Any] = [TextBlock(text)] if text else []
        for call in said.get("tool_calls") or ():
            blocks.append(ToolUseBlock(str(call.get("id") or ""), str(call.get("name") or ""), _object(call)))
        return cls(str(said["role"]), blocks, str(said.get("reasoning") or ""))


def _object(call: Mapping[str, Any]) -> dict[str, Any]:
    try:
        said = json.loads(call.get("arguments") or "{}")
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}

"""What happened, and what it is worth."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .message import Message
from .record import made


@dataclass
class DimensionScores:
    completion: float = 0.0
    robustness: float = 0.0
    communication: float = 0.0
    safety: float = 1.0
    efficiency_turns: int = 0
    efficiency_tokens: int = 0
    efficiency_wall_time_s: float = 0.0


@dataclass
class TraceMessage:
    message: Message
    trace_id: str = ""


@dataclass
class ToolDispatch:
    tool_name: str
    tool_use_id: str = ""
    endpoint_url: str = ""
    request_body: dict[str, Any] = field(default_factory=dict)
    response_status: int = 200
    response_body: Any = None
    latency_ms: float = 0.0
    trace_id: str = ""

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> "ToolDispatch":
        return made(cls, said)


@dataclass
class MediaLoad:
    modality: str = ""
    source_path: str = ""
    status: str = "loaded"

"""`task.yaml`, as graders read it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .record import made
from .tool import ToolEndpoint, ToolSpec


@dataclass
class Prompt:
    text: str
    language: str = "zh"
    attachments: list[str] = field(default_factory=list)


@dataclass
class DeterministicCheck:
    type: str
    field: str | None = None
    tool_name: str | None = None
    min_calls: int | None = None
    categories: list[str] | None = None
    min_length: int | None = None
    patterns: list[str] | None = None
    keywords: list[Any] | None = None
    description: str | None = None
    rubric: str | None = None

    def __post_init__(self) -> None:
        if self.keywords is not None:
            self.keywords = [str(keyword) for keyword in self.keywords]


@dataclass
class ScoringComponent:
    name: str
    weight: float
    check: DeterministicCheck


@dataclass
class SafetyCheck:
    type: str
    tool_name: str | None = None
    patterns: list[str] | None = None
    description: str = ""


@dataclass
class Environment:
    timeout_seconds: int = 300
    max_turns: int = 20
    fixtures: list[str] = field(default_factory=list)


@dataclass
class ServiceDef:
    name: str
    command: str
    port: int
    health_check: str
    health_check_method: str = "POST"
    ready_timeout: int = 10
    reset_endpoint: str | None = None
    env: dict[str, str] = field(default_factory=dict)


@dataclass
class ExpectedAction:
    service: str
    action_key: str
    required: bool = True


@dataclass
class TaskDefinition:
    task_id: str
    prompt: Prompt
    task_name: str = ""
    version: str = "1.0"
    category: str = ""
    difficulty: str = "simple"
    tools: list[ToolSpec] = field(default_factory=list)
    tool_endpoints: list[ToolEndpoint] = field(default_factory=list)
    environment: Environment = field(default_factory=Environment)
    scoring_components: list[ScoringComponent] = field(default_factory=list)
    safety_checks: list[SafetyCheck] = field(default_factory=list)
    services: list[ServiceDef] = field(default_factory=list)
    expected_actions: list[ExpectedAction] = field(default_factory=list)
    judge_rubric: str = ""
    reference_solution: str = ""
    primary_dimensions: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> "TaskDefinition":
        return made(cls, said)

    def get_endpoint_map(self) -> dict[str, ToolEndpoint]:
        return {endpoint.tool_name: endpoint for endpoint in self.tool_endpoints}

"""What is said on the wire, field for field. Fields beyond Orchard's are ours and optional."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

SandboxId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$")]
Status = Literal["pending", "ready", "failed", "unschedulable", "not_found"]
JobStatus = Literal["queued", "running", "succeeded", "failed"]
_DAY_S = 86400


class Shape(BaseModel):
    model_config = ConfigDict(extra="ignore")


class NetworkRequest(Shape):
    """Instead of `block_network`: exactly what can be reached."""

    mode: Literal["none", "proxy-only", "allowlist", "open"]
    hosts: list[str] = Field(default=[], max_length=256)


class CreateRequest(Shape):
    """`timeout`: seconds it may take to become ready. Ours: `labels`, `owner`, `network`, `ttl_seconds`, `disk`,
    `env`, `priority` (0 most urgent), and `lease_seconds`, after which it ends unless a heartbeat came."""

    image: str = Field(max_length=1024)
    block_network: bool = True
    sandbox_id: SandboxId | None = None
    cpu: str | None = None
    memory: str | None = None
    timeout: int | None = Field(default=None, ge=1, le=_DAY_S)
    labels: dict[str, str] = Field(default={}, max_length=64)
    owner: str | None = Field(default=None, max_length=128)
    network: NetworkRequest | None = None
    ttl_seconds: float | None = Field(default=None, gt=0, le=30 * _DAY_S)
    lease_seconds: float | None = Field(default=None, gt=0, le=_DAY_S)
    disk: str | None = None
    env: dict[str, str] = Field(default={}, max_length=256)
    priority: int = Field(default=10, ge=0, le=19)


class CreateReply(Shape):
    sandbox_id: str
    namespace: str
    image: str
    block_network: bool
    cpu: str
    memory: str
    timeout: int
    status: Status
    labels: dict[str, str] = {}
    owner: str = ""


class SandboxReply(Shape):
    sandbox_id: str
    namespace: str
    image: str
    pod_name: str
    block_network: bool
    cpu: str
    memory: str
    created_at: float
    ready: bool
    status: Status
    status_message: str
    labels: dict[str, str] = {}
    owner: str = ""
    network: str = ""
    replica: str = ""
    expires_at: float | None = None


class SandboxList(Shape):
    sandboxes: list[SandboxReply]


class SandboxDone(Shape):
    status: str
    sandbox_id: str


class ExecRequest(Shape):
    """Ours: `output_cap` in bytes a stream, `stdin` as text."""

    command: str | list[str]
    timeout_seconds: float | None = Field(default=None, ge=0, le=_DAY_S)
    cwd: str | None = Field(default=None, max_length=4096)
    env: dict[str, str] | None = Field(default=None, max_length=1024)
    login_shell: bool = False
    wait: bool = False
    stdin: str = ""
    output_cap: int | None = Field(default=None, ge=1)


class QueuedReply(Shape):
    job_id: str
    status: JobStatus


class JobReply(Shape):
    job_id: str
    sandbox_id: str
    command: str
    status: JobStatus
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None
    created_at: float
    started_at: float | None = None
    completed_at: float | None = None
    error: str | None = None
    truncated: bool = False


class PatchRequest(Shape):
    patch: str
    timeout_seconds: float = Field(default=30, gt=0, le=_DAY_S)


class PatchReply(Shape):
    success: bool
    stdout: str
    stderr: str
    exit_code: int
    error: str | None = None


class FileRequest(Shape):
    path: str = Field(max_length=8192)
    content: str


class FileWritten(Shape):
    success: bool
    path: str
    size: int


class FileReply(Shape):
    path: str
    content: str
    size: int


class FileEntry(Shape):
    name: str
    type: Literal["file", "directory"]
    size: int
    modified: str | None


class FileList(Shape):
    path: str
    files: list[FileEntry]


class Amount(Shape):
    cpu: float
    memory_bytes: int


class Node(Shape):
    name: str
    capacity: Amount
    allocatable: Amount


class PodReply(Shape):
    name: str
    namespace: str
    phase: str
    cpu_request: float
    memory_request_bytes: int


class ResourcesReply(Shape):
    status: str
    nodes: list[Node]
    total_capacity: Amount
    total_allocatable: Amount
    total_requested: Amount
    available: Amount
    sandbox_pods: list[PodReply]
    isolation: str = ""


class ErrorReply(Shape):
    detail: str

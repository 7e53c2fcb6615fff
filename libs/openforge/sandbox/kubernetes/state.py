"""What a pod's status means for its sandbox.

Promises: a pod that can never run is told from one that does not run yet, with the cluster's own cause.
"""

from typing import Any, Literal

import msgspec

_HOPELESS = (
    "ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "ImageInspectError",
    "CreateContainerConfigError", "CreateContainerError", "RunContainerError", "CrashLoopBackOff",
)  # fmt: skip


class PodState(msgspec.Struct, frozen=True, kw_only=True):
    kind: Literal["waiting", "ready", "lost"]
    why: str = ""


def state_of(pod: Any) -> PodState:
    """Of a `V1Pod`."""
    status = pod.status
    containers = [*(status.init_container_statuses or []), *(status.container_statuses or [])]
    if pod.metadata.deletion_timestamp is not None:
        return PodState(kind="lost", why="it is being deleted")
    if status.phase in ("Failed", "Succeeded"):
        return PodState(kind="lost", why=_end(status, containers))
    for container in containers:
        waiting = container.state.waiting if container.state else None
        if waiting is not None and waiting.reason in _HOPELESS:
            return PodState(kind="lost", why=f"{waiting.reason}: {waiting.message or container.image}")
    if status.phase == "Running" and any(c.name == "box" and c.state and c.state.running for c in containers):
        return PodState(kind="ready")
    return PodState(kind="waiting", why=_delay(status, containers))


def _end(status: Any, containers: list[Any]) -> str:
    """Evicted, DeadlineExceeded, OOMKilled: as the cluster calls it."""
    for container in containers:
        ended = container.state.terminated if container.state else None
        if ended is not None and (ended.exit_code or ended.reason == "OOMKilled") and not status.reason:
            reason = ended.reason or "its first process ended"
            return f"{reason} (exit code {ended.exit_code}) {ended.message or ''}".strip()
    return " ".join(filter(None, (status.reason, status.message))) or f"it is {status.phase}"


def _delay(status: Any, containers: list[Any]) -> str:
    for condition in status.conditions or []:
        if condition.type == "PodScheduled" and condition.status == "False":
            return f"{condition.reason}: {condition.message}"
    reasons = [c.state.waiting.reason for c in containers if c.state and c.state.waiting and c.state.waiting.reason]
    return reasons[0] if reasons else f"it is {status.phase}"

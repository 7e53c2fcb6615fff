"""What a harness says of itself in its headers. Hints within the attempt's own key, never authority."""

from collections.abc import Mapping

from openforge.protos import HarnessIdentity

_SESSION = ("x-claude-code-session-id", "session-id", "x-session-affinity", "x-session-id")
_THREAD = ("thread-id", "x-claude-code-agent-id", "x-session-id")
_PARENT = ("x-codex-parent-thread-id", "x-claude-code-parent-agent-id", "x-parent-session-id")
_SUB_AGENT = ("x-openai-subagent",)
_LONGEST = 200


def harness_of(headers: Mapping[str, str]) -> HarnessIdentity:
    parent = _first(headers, _PARENT)
    return HarnessIdentity(
        user_agent=headers.get("user-agent", "")[:_LONGEST],
        session=_first(headers, _SESSION),
        thread=_first(headers, _THREAD),
        parent_thread=parent,
        sub_agent=_first(headers, _SUB_AGENT),
    )


def says_retry(headers: Mapping[str, str]) -> bool:
    """Whether the client library counts this as a repeat."""
    return headers.get("x-stainless-retry-count", "0") not in ("", "0")


def _first(headers: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((headers[name][:_LONGEST] for name in names if headers.get(name)), "")

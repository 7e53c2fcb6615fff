"""What a harness says of itself in its headers and beside the conversation in its body.

Promises: hints within the attempt's own key, never authority, whatever stands there; the tree of turns holds them
against the tokens. Which harness says what was seen on the wire of Codex, Claude Code, opencode, pi and OpenHands.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from openforge.protos import HarnessIdentity

_SESSION = ("x-claude-code-session-id", "session-id", "x-session-affinity", "x-session-id")
_THREAD = ("thread-id", "x-claude-code-agent-id", "x-session-id")
_PARENT = ("x-codex-parent-thread-id", "x-claude-code-parent-agent-id", "x-parent-session-id")
_SUB_AGENT = ("x-openai-subagent",)
_WINDOW = ("x-codex-window-id",)
_CODEX_TURN = "x-codex-turn-metadata"
_CLAUDE_SUB_AGENT = b"cc_is_subagent=true"
_LONGEST = 200
_HEAD = 4096
"""How far into the system prompt a mark may stand."""
_NOTHING = msgspec.Raw(b"null")


def harness_of(headers: Mapping[str, str], beside: Mapping[str, msgspec.Raw] = {}) -> HarnessIdentity:
    """`beside` are the fields of a body, whatever the dialect."""
    told = _object(headers.get(_CODEX_TURN)) or _object(_read(beside.get("client_metadata", _NOTHING)))
    told = told | _object(told.get(_CODEX_TURN))
    mark = _first(headers, _SUB_AGENT) or _text(told.get("subagent_kind"))
    system = beside.get("system", _NOTHING)
    if not mark and (told.get("thread_source") == "subagent" or _CLAUDE_SUB_AGENT in bytes(memoryview(system)[:_HEAD])):
        mark = "subagent"
    return HarnessIdentity(
        user_agent=headers.get("user-agent", "")[:_LONGEST],
        session=_first(headers, _SESSION) or _session(beside),
        thread=_first(headers, _THREAD),
        parent_thread=_first(headers, _PARENT) or _text(told.get("parent_thread_id")),
        sub_agent=mark,
        window=_first(headers, _WINDOW) or _text(told.get("window_number")),
        purpose=_text(told.get("request_kind")),
    )


def says_retry(headers: Mapping[str, str]) -> bool:
    """Whether the client library counts this as a repeat."""
    return headers.get("x-stainless-retry-count", "0") not in ("", "0")


def _session(beside: Mapping[str, msgspec.Raw]) -> str:
    """Claude Code puts JSON into `metadata.user_id`; others name a cache key that lasts as long as the session."""
    user = _object(_read(beside.get("metadata", _NOTHING))).get("user_id")
    return _text(_object(user).get("session_id")) or _text(_read(beside.get("prompt_cache_key", _NOTHING)))


def _read(raw: msgspec.Raw) -> object:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _object(value: object) -> dict[str, Any]:
    """The object that stands there, as itself or as JSON text; an empty one for everything else."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.MsgspecError, RecursionError):
            return {}
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str:
    return str(value)[:_LONGEST] if isinstance(value, str | int) and not isinstance(value, bool) else ""


def _first(headers: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((headers[name][:_LONGEST] for name in names if headers.get(name)), "")

"""What an agent did, counted from its turns: commands, looks at its own work, recoveries, broken formats.

Promises: cheap, and never an error, whatever the messages hold. The counts are hints for a report: they read
shell commands and their results as a person would who skims them. No reward depends on them.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from openforge.tokens import Conversation, RebuiltTurn

_BLOCK = re.compile(r"```(?:bash|sh|shell)?[ \t]*\n(.*?)(?:\n?```|\Z)", re.DOTALL)
_UNREAD_CALL = re.compile(r"</?tool_call>|</?function")
_FAILED = re.compile(
    r"(?:exit[ _]?code|returncode|exit[ _]status)\W{0,6}(?:of |is )?-?[1-9]"
    r"|command not found|No such file or directory|Permission denied|Traceback \(most recent",
    re.IGNORECASE,
)
_WORD = re.compile(r"[^\s;&|]+")
_COMMANDS = re.compile(r"[;\n]|&&|\|\|?")
_WRITES = re.compile(r"(?<![0-9&])>(?!&|\s*/dev/null)|\s-(?:delete|exec|i)\b")
_LOOKS = frozenset(
    {
        "[", "awk", "cat", "cd", "cmp", "cut", "diff", "du", "echo", "egrep", "expr", "file", "find", "grep",
        "head", "less", "ls", "md5sum", "more", "od", "printf", "pwd", "realpath", "sed", "sha256sum", "sort",
        "stat", "tail", "test", "tree", "true", "uniq", "wc", "which"
    }
)  # fmt: skip


class _Step(msgspec.Struct, frozen=True):
    """One reply: its commands, whether something in it cannot be read, and what came back."""

    commands: tuple[str, ...]
    broken: bool
    came_back: str
    tokens: int


def behaviour_of(conversation: Conversation) -> dict[str, float]:
    """Counts of one attempt, all named `behaviour_*`."""
    steps = list(_steps(conversation))
    expects_commands = _expects_commands(conversation)
    return {
        "behaviour_tool_calls": float(sum(len(step.commands) for step in steps)),
        "behaviour_self_checks": float(_self_checks(steps)),
        "behaviour_errors": float(sum(bool(_FAILED.search(step.came_back)) for step in steps)),
        "behaviour_recoveries": float(_recoveries(steps)),
        "behaviour_format_errors": float(_format_errors(steps) if expects_commands else 0),
        "behaviour_reply_tokens": sum(step.tokens for step in steps) / max(len(steps), 1),
    }


def only_looks(command: str) -> bool:
    """Whether a shell line changes nothing, as far as its words say."""
    if _WRITES.search(command):
        return False
    heads = [word.group() for part in _COMMANDS.split(command) if (word := _WORD.search(part))]
    return bool(heads) and all(head in _LOOKS for head in heads)


def _self_checks(steps: Sequence[_Step]) -> int:
    """Commands that only look, after one that changed something."""
    changed, checks = False, 0
    for command in (command for step in steps for command in step.commands):
        if not only_looks(command):
            changed = True
        elif changed:
            checks += 1
    return checks


def _recoveries(steps: Sequence[_Step]) -> int:
    """Commands that went well right after one that failed."""
    acted = [step for step in steps if step.commands and step.came_back]
    went = [not _FAILED.search(step.came_back) for step in acted]
    return sum(well and not before for before, well in pairwise(went))


def _format_errors(steps: Sequence[_Step]) -> int:
    """Replies that the harness could not act on. A last word after some commands is none."""
    errors = sum(step.broken or not step.commands for step in steps)
    closing = bool(steps) and not steps[-1].commands and not steps[-1].broken
    return errors - int(closing and any(step.commands for step in steps))


def _expects_commands(conversation: Conversation) -> bool:
    """Tools were offered, or the prompt shows a block of code."""
    for turn in conversation:
        return bool(turn.fact.tools.strip() not in (b"", b"[]")) or b"```" in turn.fact.messages
    return False


def _steps(conversation: Conversation) -> Iterator[_Step]:
    answers = {turn.fact.parent: turn for turn in reversed(conversation.turns.values())}
    for turn in conversation:
        commands, broken = _commands(_message(turn.fact.reply))
        following = answers.get(turn.fact.turn)
        yield _Step(commands, broken, _came_back(following) if following else "", turn.sampled_length)


def _commands(reply: dict[str, Any]) -> tuple[tuple[str, ...], bool]:
    calls = reply.get("tool_calls")
    if isinstance(calls, list) and calls:
        read = [_command_of(call) for call in calls]
        return tuple(command for command in read if command is not None), None in read
    content = reply.get("content")
    if not isinstance(content, str):
        return (), False
    block = _BLOCK.search(content)
    return ((block[1].strip(),) if block else ()), bool(_UNREAD_CALL.search(content))


def _command_of(call: Any) -> str | None:
    """The shell line of a tool call, its whole arguments where it has none; None where they do not parse."""
    function = call.get("function", call) if isinstance(call, dict) else {}
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if isinstance(arguments, str):
        arguments = _json(arguments.encode())
    if not isinstance(arguments, dict):
        return None
    shell = next((arguments[key] for key in ("command", "cmd", "commands", "script") if key in arguments), arguments)
    return shell if isinstance(shell, str) else str(shell)


def _came_back(turn: RebuiltTurn) -> str:
    """The texts that the harness added before it asked again."""
    messages = _json(turn.fact.messages)
    if not isinstance(messages, list):
        return ""
    texts = [
        message.get("content")
        for message in messages
        if isinstance(message, dict) and message.get("role") in ("user", "tool")
    ]
    return "\n".join(text for text in texts if isinstance(text, str))


def _message(packed: bytes) -> dict[str, Any]:
    message = _json(packed)
    return message if isinstance(message, dict) else {}


def _json(packed: bytes) -> Any:
    try:
        return msgspec.json.decode(packed)
    except (msgspec.DecodeError, RecursionError):
        return None

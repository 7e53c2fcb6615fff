"""What an agent did, counted from its turns: commands, looks at its own work, recoveries, tools, plans, broken formats.

Promises: cheap, and never an error, whatever the messages hold. The counts are hints for a report: they read
shell commands and their results as a person would who skims them. No reward depends on them. What an agent had no tools
or no plan for is not counted as none.
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
    r"|command not found|No such file or directory|Permission denied|Traceback \(most recent|^Error\b",
    re.IGNORECASE | re.MULTILINE,
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


_LOOKING = frozenset({"check", "fetch", "find", "get", "list", "look", "query", "read", "search", "show", "view"})
_NAME_PARTS = re.compile(r"[A-Z]?[a-z]+")
_BOX = re.compile(r"^\s*[-*] \[([ xX])\]", re.MULTILINE)
_DONE = frozenset({"completed", "complete", "done", "finished"})


class _Command(msgspec.Struct, frozen=True):
    """A call of `tool`, or a block of code, which has no name. `line` is its shell line, else its arguments as text."""

    line: str
    tool: str = ""
    shell: bool = True

    def only_looks(self) -> bool:
        if self.shell:
            return only_looks(self.line)
        return bool(_LOOKING & {part.lower() for part in _NAME_PARTS.findall(self.tool)})


class _Step(msgspec.Struct, frozen=True):
    """One reply: its commands, its steps of a plan, whether something in it cannot be read, and what came back.

    `plan` says of each step whether it is done; empty where the reply holds no plan.
    """

    commands: tuple[_Command, ...]
    plan: tuple[bool, ...]
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
        **_coverage(steps, _offered(conversation)),
        **_plan(steps),
    }


def only_looks(command: str) -> bool:
    """Whether a shell line changes nothing, as far as its words say."""
    if _WRITES.search(command):
        return False
    heads = [word.group() for part in _COMMANDS.split(command) if (word := _WORD.search(part))]
    return bool(heads) and all(head in _LOOKS for head in heads)


def _coverage(steps: Sequence[_Step], offered: set[str]) -> dict[str, float]:
    """The share of the tools on offer that were called."""
    if not offered:
        return {}
    called = {command.tool for step in steps for command in step.commands}
    return {"behaviour_tool_coverage": len(called & offered) / len(offered)}


def _plan(steps: Sequence[_Step]) -> dict[str, float]:
    """The steps of the last plan, and how many of them it says are done."""
    plans = [step.plan for step in steps if step.plan]
    if not plans:
        return {}
    return {"behaviour_plan_steps": float(len(plans[-1])), "behaviour_plan_steps_done": float(sum(plans[-1]))}


def _self_checks(steps: Sequence[_Step]) -> int:
    """Commands that only look, after one that changed something."""
    changed, checks = False, 0
    for command in (command for step in steps for command in step.commands):
        if not command.only_looks():
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


def _offered(conversation: Conversation) -> set[str]:
    """The names of all tools that any call could have used."""
    listed = (_json(turn.fact.tools) for turn in conversation if turn.fact.tools)
    tools = [tool for some in listed if isinstance(some, list) for tool in some if isinstance(tool, dict)]
    return {str(tool["name"]) for tool in tools if tool.get("name")}


def _steps(conversation: Conversation) -> Iterator[_Step]:
    answers = {turn.fact.parent: turn for turn in reversed(conversation.turns.values())}
    for turn in conversation:
        reply = _message(turn.fact.reply)
        commands, broken = _commands(reply)
        following = answers.get(turn.fact.turn)
        came_back = _came_back(following) if following else ""
        yield _Step(commands, _plan_of(reply), broken, came_back, turn.fact.sampled_tokens())


def _commands(reply: dict[str, Any]) -> tuple[tuple[_Command, ...], bool]:
    calls = reply.get("tool_calls")
    if isinstance(calls, list) and calls:
        read = [_command_of(call) for call in calls]
        return tuple(command for command in read if command is not None), None in read
    content = reply.get("content")
    if not isinstance(content, str):
        return (), False
    block = _BLOCK.search(content)
    return ((_Command(block[1].strip()),) if block else ()), bool(_UNREAD_CALL.search(content))


def _command_of(call: Any) -> _Command | None:
    """None where its arguments do not parse."""
    name, arguments = _called(call)
    if arguments is None:
        return None
    for key in ("command", "cmd", "commands", "script"):
        if key in arguments:
            return _Command(str(arguments[key]), name)
    return _Command(str(arguments), name, shell=False)


def _called(call: Any) -> tuple[str, dict[str, Any] | None]:
    """The tool and its arguments, None where they do not parse."""
    function = call.get("function", call) if isinstance(call, dict) else {}
    if not isinstance(function, dict):
        return "", None
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _json(arguments.encode())
    return str(function.get("name") or ""), arguments if isinstance(arguments, dict) else None


def _plan_of(reply: dict[str, Any]) -> tuple[bool, ...]:
    """The steps that a planning tool was told, or that stand as boxes in the text."""
    calls = reply.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        _, arguments = _called(call)
        for value in (arguments or {}).values():
            if isinstance(value, list) and value and all(isinstance(one, dict) and "status" in one for one in value):
                return tuple(str(one["status"]).lower() in _DONE for one in value)
    content = reply.get("content")
    boxes = _BOX.findall(content) if isinstance(content, str) else []
    return tuple(box != " " for box in boxes)


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

"""ChatML with Hermes tool calls: `<tools>` in the system turn, `<tool_call>` in answers, role `tool` for results.

An answer may begin with its reasoning in `<think>`; the prompt keeps the reasoning that the harness sends back.

Promises: `render` gives the ids that the chat template `chatml_hermes.jinja` of our models gives, turn by turn
and cached; a conversation's ids after `bridge` begin with the very ids that were recorded; a system text that
nobody wrote stands only where tools need a system turn.
"""

import json
import os
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from openforge.chat.contract import Guide, Message, Parsed, Tool, ToolCall, ToolChoice
from openforge.chat.encoding import coder

OPEN, CLOSE = "<|im_start|>", "<|im_end|>"
CALL, CALLED = "<tool_call>", "</tool_call>"
THINK, THOUGHT = "<think>", "</think>"

_DEFAULT_SYSTEM = "You are a helpful assistant."
_TOOLS_HEAD = "\n\n# Tools\n\nThese functions can be called, one JSON description a line:\n<tools>\n"
_TOOLS_TAIL = (
    "</tools>\n\nTo call a function, answer with a JSON object of its name and arguments:\n"
    '<tool_call>\n{"name": "the function", "arguments": {"argument": "value"}}\n</tool_call>'
)


class BadTokenizer(ValueError):
    """The tokenizer cannot carry this template token by token."""


class ChatMLHermes:
    """A `Renderer`. One instance serves any number of conversations."""

    holds: tuple[str, ...] = (CALL,)
    thinking: tuple[str, str] | None = (THINK, THOUGHT)
    call_ends: str = CALLED
    sees_images: bool = False

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._encode_now, self._decode = coder(tokenizer)
        self._open, self._close = _special(tokenizer, OPEN), _special(tokenizer, CLOSE)
        self._encode = lru_cache(maxsize=512)(self._encode_now)
        self._newline = self._encode("\n")
        self._generation = self._encode(f"{OPEN}assistant\n")
        self.stop_token_ids: tuple[int, ...] = (self._close,)
        self._check_boundaries()

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        ids: list[int] = []
        for turn in _turns(messages, tools):
            ids += self._encode(turn)
        ids += self._generation
        return ids

    def prepare(self, messages: Sequence[Message], tools: Sequence[Tool]) -> None:
        for turn in _turns(messages, tools):
            self._encode(turn)

    def bridge(
        self, prompt_and_answer: Sequence[int], new_messages: Sequence[Message], tools: Sequence[Tool]
    ) -> list[int] | None:
        ended = bool(prompt_and_answer) and prompt_and_answer[-1] == self._close
        ids = [] if ended else [self._close]
        ids += self._newline
        for message in new_messages:
            ids += self._encode(_turn(message))
        ids += self._generation
        return ids

    def parse(self, ids: Sequence[int], tools: Sequence[Tool]) -> Parsed:
        reasoning, text = split_reasoning(self.text(ids))
        if not tools:
            return Parsed(content=text, reasoning=reasoning)
        parsed = parse_hermes(text, {tool.name for tool in tools})
        return msgspec.structs.replace(parsed, reasoning=reasoning) if reasoning else parsed

    def guide(self, tools: Sequence[Tool], choice: ToolChoice, *, parallel: bool, schema: bytes) -> Guide | None:
        offered = [tool for tool in tools if not choice.names or tool.name in choice.names]
        if choice.mode in ("required", "named") and offered:
            return Guide(grammar=_grammar(offered, parallel, b""))
        if not schema and choice.mode == "auto" and 0 < len(offered) < len(tools):
            return Guide(grammar=_grammar(offered, parallel, b"", text=True))
        if not schema:
            return None
        if choice.mode == "none" or not offered:
            return Guide(schema=schema.decode())
        return Guide(grammar=_grammar(offered, parallel, schema))

    def text(self, ids: Sequence[int]) -> str:
        return self._decode(ids)

    def _check_boundaries(self) -> None:
        """Turns are encoded one by one: that must give what the whole text gives."""
        first, second = f"{OPEN}user\n 1 a\n{CLOSE}\n", f"{OPEN}assistant\n"
        if self._encode_now(first + second) != self._encode_now(first) + self._encode_now(second):
            raise BadTokenizer(f"the tokenizer joins text across {OPEN}: renderer chatml-hermes cannot continue it")


def _special(tokenizer: Tokenizer, text: str) -> int:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if len(ids) != 1:
        raise BadTokenizer(f"the tokenizer has no single token for {text}: renderer chatml-hermes needs one")
    return int(ids[0])


def _turns(messages: Sequence[Message], tools: Sequence[Tool]) -> Iterable[str]:
    if not tools:
        return map(_turn, messages)
    headed = bool(messages) and messages[0].role == "system"
    head = messages[0].content if headed else _DEFAULT_SYSTEM
    return (_system_with_tools(head, tools), *map(_turn, messages[1:] if headed else messages))


def _system_with_tools(system: str, tools: Sequence[Tool]) -> str:
    lines = "".join(_json(tool_as_json(tool)) + "\n" for tool in tools)
    return f"{OPEN}system\n{system}{_TOOLS_HEAD}{lines}{_TOOLS_TAIL}{CLOSE}\n"


def _turn(message: Message) -> str:
    pieces = [message.content] if message.content else []
    pieces += [
        f'{CALL}\n{{"name": {_json(call.name)}, "arguments": {call.arguments}}}\n{CALLED}'
        for call in message.tool_calls
    ]
    thoughts = f"{THINK}\n{message.reasoning}\n{THOUGHT}\n\n" if message.reasoning else ""
    return f"{OPEN}{message.role}\n{thoughts}{chr(10).join(pieces)}{CLOSE}\n"


def _lenient(schema: object) -> object:
    """Keywords that the engine's library does not know are left out, not refused."""
    return schema | {"x-guidance": {"lenient": True}} if isinstance(schema, dict) else schema


def _grammar(tools: Sequence[Tool], parallel: bool, schema: bytes, *, text: bool = False) -> str:
    """Calls of these tools, each as the template shows it; or an answer that matches `schema`; or, with `text`, any
    text, after which there may be calls.
    """
    more = ' ("\\n" call)*' if parallel else ""
    starts = [f"PLAIN | text body{more}" if text else f"call{more}", *(["answer"] if schema else [])]
    bodies = " | ".join(f"body{index}" for index in range(len(tools)))
    lines = [f"start: {' | '.join(starts)}", f"call: {_json(CALL)} body", f"body: {bodies}"]
    if text:
        lines += [f"PLAIN: /(?s:.*)/ & ~/(?s:.*){CALL}(?s:.*)/", f"text[suffix={_json(CALL)}]: /(?s:.*)/"]
    closing = _json("}\n" + CALLED)
    for index, tool in enumerate(tools):
        opening = _json(f'\n{{"name": {_json(tool.name)}, "arguments": ')
        arguments = _json(_lenient({"type": "object", **tool.parameters}))
        lines += [f"body{index}: {opening} arguments{index} {closing}", f"arguments{index}: %json {arguments}"]
    if schema:
        lines.append(f"answer: %json {_json(_lenient(msgspec.json.decode(schema)))}")
    return "\n".join(lines) + "\n"


def tool_as_json(tool: Tool) -> dict[str, object]:
    """The tool as the prompt shows it, and as a chat template expects it."""
    function: dict[str, object] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    function["parameters"] = tool.parameters
    return {"type": "function", "function": function}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def split_reasoning(text: str) -> tuple[str, str]:
    """The reasoning that an answer begins with, and the rest. Reasoning that never ends is all there is."""
    opened = text.lstrip()
    if not opened.startswith(THINK):
        return "", text
    reasoning, _, rest = opened.removeprefix(THINK).partition(THOUGHT)
    return reasoning.strip("\n"), rest.lstrip("\n")


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


_CALL_DECODER = msgspec.json.Decoder(_Call)
_BLOCK = re.compile(re.escape(CALL) + r"(.*?)(?:" + re.escape(CALLED) + r"|\Z)", re.DOTALL)
_NAMED = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"arguments"\s*:\s*(.*\S)\s*\}\s*\Z', re.DOTALL)


def parse_hermes(text: str, known: set[str]) -> Parsed:
    """Content and calls of an answer. What cannot be read as a call stays in the content as it was sampled.

    A call whose arguments are no JSON is still a call if its name can be read: the harness then tells the
    model what is wrong with them, as it would for any model.
    """
    calls: list[ToolCall] = []
    broken: list[str] = []
    pieces: list[str] = []
    position = 0
    for block in _BLOCK.finditer(text):
        call, complaint = _read_call(block, len(calls))
        if complaint:
            broken.append(complaint)
        if call is None:
            continue
        if call.name not in known:
            broken.append("unknown_tool")
        calls.append(call)
        pieces.append(text[position : block.start()])
        position = block.end()
    if not calls:
        return Parsed(content=text, broken=tuple(broken))
    pieces.append(text[position:])
    return Parsed(content=_around_calls(pieces), tool_calls=tuple(calls), broken=tuple(broken))


def _read_call(block: re.Match[str], index: int) -> tuple[ToolCall | None, str]:
    body = block.group(1)
    unclosed = not block.group(0).endswith(CALLED)
    try:
        call = _CALL_DECODER.decode(body)
        return ToolCall(id=f"call_{index}", name=call.name, arguments=_arguments(call.arguments)), ""
    except (msgspec.DecodeError, RecursionError):
        named = None if unclosed else _NAMED.match(body)
    if named is None:
        return None, "unclosed_call" if unclosed else "malformed_call"
    return ToolCall(id=f"call_{index}", name=named.group(1), arguments=named.group(2)), "invalid_arguments"


def _arguments(raw: msgspec.Raw) -> str:
    """The JSON text as sampled; a JSON string is taken to hold the JSON text."""
    text = bytes(raw).decode()
    return msgspec.json.decode(text, type=str) if text.startswith('"') else text


def _around_calls(pieces: Sequence[str]) -> str:
    """The text beside the calls: what stood before the first one keeps its beginning."""
    first, *others = pieces
    return "\n".join(piece for piece in (first.rstrip(), *(other.strip() for other in others)) if piece)


def load_tokenizer(model_path: str | Path) -> Tokenizer:
    path = Path(model_path) / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"model.path = {str(model_path)!r} has no tokenizer.json: give a Hugging Face folder")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # texts come one by one: a thread pool would only cost
    return Tokenizer.from_file(str(path))

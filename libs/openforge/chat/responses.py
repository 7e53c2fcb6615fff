"""The OpenAI Responses dialect: items in, items and their events out.

Promises: the items of an answer are told in the order in which it was sampled, as a stream or whole; reasoning goes out
sealed where the harness asks for that, so that it comes back as it was sampled.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from openforge.chat.contract import Tool, ToolCall
from openforge.chat.dialect import KEEP_ALIVE, Answer, Head, Problem, Request
from openforge.chat.openai_forms import error_body, overflow, told_input
from openforge.chat.responses_request import decode
from openforge.chat.sealed import seal
from openforge.protos import FinishReason

NAME = "responses"
ENCRYPTED = "reasoning.encrypted_content"


def encode(head: Head, request: Request, answer: Answer) -> bytes:
    return msgspec.json.encode(_response(head, request, _output(head, request, answer), answer))


def _output(head: Head, request: Request, answer: Answer) -> list[dict[str, Any]]:
    said = answer.message
    items: list[dict[str, Any]] = []
    if said.reasoning:
        items.append(_reasoning_item(head, request, said.reasoning))
    if said.content or not (said.reasoning or said.tool_calls):
        items.append(_message_item(head, said.content, _status(answer)))
    return items + _call_items(head, request, said.tool_calls)


def _reasoning_item(head: Head, request: Request, reasoning: str) -> dict[str, Any]:
    item: dict[str, Any] = {"id": f"rs_{head.id}", "type": "reasoning", "summary": [_summary(reasoning)]}
    if ENCRYPTED in request.wants:
        item["encrypted_content"] = seal(reasoning)
    return item


def _summary(text: str) -> dict[str, str]:
    return {"type": "summary_text", "text": text}


def _message_item(head: Head, text: str, status: str) -> dict[str, Any]:
    content = [_output_text(text)]
    return {"id": f"msg_{head.id}", "type": "message", "status": status, "role": "assistant", "content": content}


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call_items(head: Head, request: Request, calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    tools = {tool.name: tool for tool in request.tools} if calls else {}
    return [_call_item(f"{head.id}_{index}", call, tools.get(call.name)) for index, call in enumerate(calls)]


def _call_item(name: str, call: ToolCall, tool: Tool | None) -> dict[str, Any]:
    item: dict[str, Any] = {"status": "completed", "name": tool.told_name if tool else call.name}
    if tool and tool.namespace:
        item["namespace"] = tool.namespace
    if tool and tool.kind == "custom":
        call_id, text = told_input(call)
        return item | {"id": f"ctc_{name}", "type": "custom_tool_call", "call_id": call_id, "input": text}
    return item | {"id": f"fc_{name}", "type": "function_call", "call_id": call.id, "arguments": call.arguments}


def _status(answer: Answer) -> str:
    """A whole call in an answer that was cut is still a call."""
    return "incomplete" if answer.finish is FinishReason.LENGTH and not answer.message.tool_calls else "completed"


def _response(
    head: Head, request: Request, output: list[dict[str, Any]], answer: Answer | None = None
) -> dict[str, Any]:
    """What of the request is told back is what it said."""
    status = _status(answer) if answer else "in_progress"
    asked = request.asked
    return {
        "id": f"resp_{head.id}",
        "object": "response",
        "created_at": head.created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": None,
        "max_output_tokens": request.max_tokens,
        "metadata": {},
        "model": head.model,
        "output": output,
        "parallel_tool_calls": request.parallel_calls,
        "previous_response_id": None,
        "reasoning": asked.get("reasoning") or {"effort": None, "summary": None},
        "store": False,
        "temperature": asked.get("temperature"),
        "text": asked.get("text") or {"format": {"type": "text"}},
        "tool_choice": asked.get("tool_choice") or "auto",
        "tools": request.tools_as_sent,
        "top_p": asked.get("top_p"),
        "truncation": "disabled",
        "usage": _usage(answer) if answer else None,
    }


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens or 0},
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }


_THOUGHT = (
    b'event: response.reasoning_summary_text.delta\ndata: {"type":"response.reasoning_summary_text.delta",'
    b'"sequence_number":%d,"item_id":"rs_%b","output_index":%d,"summary_index":0,"delta":%b}\n\n'
)
_TEXT = (
    b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta",'
    b'"sequence_number":%d,"item_id":"msg_%b","output_index":%d,"content_index":0,"delta":%b,"logprobs":[]}\n\n'
)


class ResponsesStream:
    """A `Stream` of Responses events: numbered, one item after the other, each closed before the next one opens."""

    def __init__(self, head: Head, request: Request) -> None:
        self._head = head
        self._id = head.id.encode()
        self._request = request
        self._sequence = 0
        self._done: list[dict[str, Any]] = []
        self._open = ""
        self._reasoned: list[str] = []
        self._told: list[str] = []

    def start(self) -> bytes:
        response = _response(self._head, self._request, [])
        return self._event("created", response=response) + self._event("in_progress", response=response)

    def reasoning(self, text: str) -> bytes:
        opened = b"" if self._open == "reasoning" else self._open_reasoning()
        self._reasoned.append(text)
        return opened + self._delta(_THOUGHT, text)

    def text(self, text: str) -> bytes:
        opened = b"" if self._open == "message" else self._close() + self._open_message()
        self._told.append(text)
        return opened + self._delta(_TEXT, text)

    def end(self, answer: Answer) -> bytes:
        said = answer.message
        pieces = []
        if not self._told and (thought := said.reasoning[len("".join(self._reasoned)) :]):
            pieces.append(self.reasoning(thought))
        rest = said.content[len("".join(self._told)) :]
        if rest or not (said.content or said.reasoning or said.tool_calls):
            pieces.append(self.text(rest))
        pieces.append(self._close(_status(answer)))
        pieces += [self._call(item) for item in _call_items(self._head, self._request, said.tool_calls)]
        response = _response(self._head, self._request, self._done, answer)
        pieces.append(self._event(response["status"], response=response))
        return b"".join(pieces)

    def error(self, problem: Problem, message: str) -> bytes:
        code = "context_length_exceeded" if problem is Problem.TOO_LONG else "server_error"
        failed = {"status": "failed", "error": {"code": code, "message": message}}
        return self._event("failed", response=_response(self._head, self._request, self._done) | failed)

    def keep_alive(self) -> bytes:
        return KEEP_ALIVE

    def _open_reasoning(self) -> bytes:
        self._open = "reasoning"
        item = {"id": f"rs_{self._head.id}", "type": "reasoning", "summary": []}
        part = {"item_id": item["id"], "summary_index": 0, "part": _summary("")}
        return self._item("added", item) + self._in_item("reasoning_summary_part.added", part)

    def _open_message(self) -> bytes:
        self._open = "message"
        item = _message_item(self._head, "", "in_progress") | {"content": []}
        part = {"item_id": item["id"], "content_index": 0, "part": _output_text("")}
        return self._item("added", item) + self._in_item("content_part.added", part)

    def _close(self, status: str = "completed") -> bytes:
        """The end of the open item, if one is open."""
        kind, self._open = self._open, ""
        if kind == "reasoning":
            text = "".join(self._reasoned)
            item = _reasoning_item(self._head, self._request, text)
            place = {"item_id": item["id"], "summary_index": 0}
            closing = self._in_item("reasoning_summary_text.done", place | {"text": text})
            closing += self._in_item("reasoning_summary_part.done", place | {"part": _summary(text)})
            return closing + self._finish(item)
        if kind == "message":
            text = "".join(self._told)
            item = _message_item(self._head, text, status)
            place = {"item_id": item["id"], "content_index": 0}
            closing = self._in_item("output_text.done", place | {"text": text, "logprobs": []})
            closing += self._in_item("content_part.done", place | {"part": _output_text(text)})
            return closing + self._finish(item)
        return b""

    def _call(self, item: dict[str, Any]) -> bytes:
        custom = item["type"] == "custom_tool_call"
        name, field = ("custom_tool_call_input", "input") if custom else ("function_call_arguments", "arguments")
        opened = self._item("added", item | {field: "", "status": "in_progress"})
        place = {"item_id": item["id"]}
        delta = self._in_item(f"{name}.delta", place | {"delta": item[field]})
        done = place | {field: item[field]} | ({} if custom else {"name": item["name"]})
        return opened + delta + self._in_item(f"{name}.done", done) + self._finish(item)

    def _finish(self, item: dict[str, Any]) -> bytes:
        told = self._item("done", item)
        self._done.append(item)
        return told

    def _item(self, what: str, item: dict[str, Any]) -> bytes:
        return self._in_item(f"output_item.{what}", {"item": item})

    def _in_item(self, kind: str, fields: dict[str, Any]) -> bytes:
        return self._event(kind, output_index=len(self._done), **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        told = msgspec.json.encode({"type": f"response.{kind}", "sequence_number": self._sequence, **fields})
        self._sequence += 1
        return b"event: response." + kind.encode() + b"\ndata: " + told + b"\n\n"

    def _delta(self, form: bytes, text: str) -> bytes:
        told = form % (self._sequence, self._id, len(self._done), msgspec.json.encode(text))
        self._sequence += 1
        return told


def stream(head: Head, request: Request) -> ResponsesStream:
    return ResponsesStream(head, request)


def error(problem: Problem, message: str) -> bytes:
    return error_body(problem, message, "input")


def counted(tokens: int) -> bytes:
    """The answer to `POST /responses/input_tokens`."""
    return msgspec.json.encode({"object": "response.input_tokens", "input_tokens": tokens})


__all__ = ["NAME", "ResponsesStream", "counted", "decode", "encode", "error", "overflow", "stream"]

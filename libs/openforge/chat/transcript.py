"""Conversations in which the results of parallel calls come in any order, and an answer may come in pieces.

Promises: results stand in the order of their calls; nothing else changes its place.
"""

from openforge.chat.contract import Message, ToolCall


class Transcript:
    """`calls` are those of the newest answer."""

    def __init__(self) -> None:
        self.calls: tuple[ToolCall, ...] = ()
        self._messages: list[Message] = []
        self._results: list[Message] = []

    def put(self, message: Message) -> None:
        self._put_results()
        self._messages.append(message)

    def result(self, message: Message) -> None:
        """The result of a call, in its place among those that stand beside it."""
        self._results.append(message)

    def say(self, answer: Message) -> None:
        self.put(answer)
        self.calls = answer.tool_calls

    def reopened(self) -> Message:
        """The answer that stands last, taken away so that more can be said; an empty one where none does."""
        if self._messages and not self._results and self._messages[-1].role == "assistant":
            return self._messages.pop()
        return Message(role="assistant")

    def whole(self) -> tuple[Message, ...]:
        self._put_results()
        return tuple(self._messages)

    def _put_results(self) -> None:
        if self._results:
            order = {call.id: place for place, call in enumerate(self.calls)}
            self._messages += sorted(self._results, key=lambda result: order.get(result.tool_call_id, len(order)))
            self._results = []

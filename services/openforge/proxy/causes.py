"""Why a call goes on from no turn, or from one that another call went on from already, and whose call it is.

Promises: what the harness says of itself comes first, and is held against the tokens; without it the shape of the
conversation decides; where neither explains a branch, it is not guessed.
"""

from openforge.chat.canonical import Chain, answer_key
from openforge.protos import BranchCause, Caller
from openforge.proxy.turns import Question, Standing, Turn

_COMPACTION = "compaction"
_NOTHING = b"\0" * 16
"""The chain before the first message."""
_TELLING = 24
"""Characters of a line that hardly stands in two texts by chance."""


class History:
    """What is known of an attempt's conversations beyond their tokens."""

    def __init__(self) -> None:
        self._threads: dict[str, Caller] = {}
        self._windows: dict[str, set[str]] = {}
        self._longest: dict[str, int] = {}
        self._firsts: dict[bytes, Caller] = {}
        self._bare: set[bytes] = set()
        self._but_last: set[tuple[bytes, bytes]] = set()
        self._had_tools = False
        self._texts: list[frozenset[str]] = []

    def add(self, turn: Turn, after: Chain, question: Question, key: bytes) -> None:
        """`key` is the answer's."""
        thread = turn.thread
        if turn.caller is not Caller.SIDE_CALL:
            self._threads.setdefault(thread, turn.caller)
        self._windows.setdefault(thread, set()).add(question.harness.window)
        before_it = 0 if turn.cause is BranchCause.COMPACTION else self._longest.get(thread, 0)
        self._longest[thread] = max(before_it, len(question.messages) + 1)
        self._firsts.setdefault(question.steps[0], turn.caller)
        self._bare.add(after.bare)
        self._had_tools = self._had_tools or bool(turn.tools)
        if not turn.reply.tool_calls and (lines := _telling_lines(turn.reply.content)):
            self._texts.append(lines)
        if question.messages[-1].role == "user":
            before = question.steps[-2] if len(question.steps) > 1 else _NOTHING
            self._but_last.add((before, key))

    def explain(self, question: Question, tools: bytes, standing: Standing) -> tuple[BranchCause, Caller]:
        cause = self._cause(question, tools, standing)
        match cause:
            case BranchCause.START:
                return cause, Caller.MAIN
            case BranchCause.SUB_AGENT:
                return cause, Caller.SUB_AGENT
            case BranchCause.SIDE_CALL:
                return cause, Caller.SIDE_CALL
        return cause, self._caller(question, standing)

    def _cause(self, question: Question, tools: bytes, standing: Standing) -> BranchCause:
        if not self._threads:
            return BranchCause.START
        if question.harness.purpose == _COMPACTION:
            return BranchCause.SIDE_CALL
        if self._is_new_agent(question, standing):
            return BranchCause.SUB_AGENT
        if self._reasoning_known(question) > max(standing.known, standing.at):
            return BranchCause.REASONING_DROPPED
        if standing.known > standing.at:
            return BranchCause.TOOLS_CHANGED if tools else BranchCause.SIDE_CALL
        if standing.parent is not None and standing.fresh and not standing.parent.followed:
            return BranchCause.CONTINUED
        if self._is_new_window(question):
            return BranchCause.COMPACTION
        if self._is_without_last(question):
            return BranchCause.TRANSIENT
        if standing.parent is not None:
            return BranchCause.REWRITTEN
        return self._cause_by_shape(question, tools)

    def _cause_by_shape(self, question: Question, tools: bytes) -> BranchCause:
        longest = self._longest.get(question.harness.thread) or max(self._longest.values())
        shorter = len(question.messages) < longest - 1
        if shorter and self._is_summed_up(question):
            return BranchCause.COMPACTION
        if question.steps[0] in self._firsts:
            return BranchCause.COMPACTION if shorter else BranchCause.REWRITTEN
        if any(message.role == "assistant" for message in question.messages):
            return BranchCause.REWRITTEN
        if not tools:
            return BranchCause.SIDE_CALL
        return BranchCause.SUB_AGENT if self._had_tools else BranchCause.START

    def _is_new_agent(self, question: Question, standing: Standing) -> bool:
        """A thread that nobody named before. One that only goes on under another name is no new agent."""
        said = question.harness
        if said.thread:
            marked = bool(said.sub_agent or said.parent_thread)
            goes_on = standing.parent is not None and standing.fresh and not standing.parent.followed
            return said.thread not in self._threads and (marked or not goes_on)
        return bool(said.sub_agent) and standing.known == 0 and question.steps[0] not in self._firsts

    def _is_new_window(self, question: Question) -> bool:
        said = question.harness
        known = self._windows.get(said.thread, set())
        return bool(said.window) and bool(known) and said.window not in known

    def _reasoning_known(self, question: Question) -> int:
        """How many of the messages end with a recorded answer if reasoning does not count."""
        steps = question.bare_steps
        return next((at for at in range(len(steps), 0, -1) if steps[at - 1] in self._bare), 0)

    def _is_without_last(self, question: Question) -> bool:
        """Whether an answer comes back without the user message that was asked last."""
        before = _NOTHING
        for message, step in zip(question.messages, question.steps, strict=True):
            if message.role == "assistant" and (before, answer_key(message)) in self._but_last:
                return True
            before = step
        return False

    def _is_summed_up(self, question: Question) -> bool:
        """Whether somebody other than the model says what a whole answer said: most of its lines, in one message."""
        others = [message.content for message in question.messages if message.role in ("user", "system")]
        return any(
            2 * sum(line in content for line in lines) >= len(lines) for lines in self._texts for content in others
        )

    def _caller(self, question: Question, standing: Standing) -> Caller:
        """Whose conversation it is that changed: the turn's that it goes on from, the thread's, or the beginning's."""
        if standing.parent is not None:
            return standing.parent.caller
        thread = question.harness.thread
        if thread and thread in self._threads:
            return self._threads[thread]
        return self._firsts.get(question.steps[0], Caller.MAIN)


def _telling_lines(text: str) -> frozenset[str]:
    return frozenset(line for raw in text.splitlines() if len(line := raw.strip()) >= _TELLING)

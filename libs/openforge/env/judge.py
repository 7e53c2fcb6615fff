"""Judges: models that say what checks cannot compute. Checks ask, who runs them answers; no key is ever in a box.

Checks that want an answer print `{"ask": {"<id>": [messages]}}` as their last line instead of a reward. They are run
again, in a fresh box, with `/tests/judge.json`: the answers so far by id, or null where the run has no judge.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from openforge.endpoint import Endpoint, EndpointError

Messages = Sequence[Mapping[str, Any]]
ANSWERS = "judge.json"
MOST_ROUNDS = 4
MOST_QUESTIONS = 32


class JudgeFailed(Exception):
    """There is no judge, it could not be reached, or its answer cannot be read: nobody's verdict."""


class Judge(Protocol):
    async def answer(self, question: Messages) -> str:
        """What the judge says; raises `JudgeFailed`."""
        ...

    async def close(self) -> None: ...


class EndpointJudge:
    """A model behind an OpenAI-compatible endpoint, asked at temperature 0."""

    def __init__(self, endpoint: Endpoint, *, max_tokens: int) -> None:
        self._endpoint = endpoint
        self._max_tokens = max_tokens

    async def close(self) -> None:
        await self._endpoint.close()

    async def answer(self, question: Messages) -> str:
        body = {"messages": list(question), "temperature": 0, "max_tokens": self._max_tokens}
        try:
            said = (await self._endpoint.chat(body))["choices"][0]["message"]["content"]
        except EndpointError as error:
            raise JudgeFailed(f"the judge gave no answer: {error}") from error
        except (KeyError, IndexError, TypeError) as error:
            raise JudgeFailed("the judge's answer has no message") from error
        if not isinstance(said, str) or not said.strip():
            raise JudgeFailed("the judge's answer has no text: judge.max_tokens may leave no room after its reasoning")
        return said


class Hearing:
    """One verification's questions and answers. A question is asked once."""

    def __init__(self, judge: Judge | None) -> None:
        self._judge = judge
        self._answers: dict[str, str] = {}
        self._rounds = 0

    def file(self) -> bytes:
        """`judge.json`."""
        return msgspec.json.encode(None if self._judge is None else self._answers)

    async def ask(self, questions: Mapping[str, Messages]) -> None:
        """Raises `JudgeFailed`."""
        if self._judge is None:
            raise JudgeFailed("the checks ask a judge and the run has none: write [judge] in the run file")
        self._rounds += 1
        fresh = {key: question for key, question in questions.items() if key not in self._answers}
        if not fresh or self._rounds > MOST_ROUNDS or len(self._answers) + len(fresh) > MOST_QUESTIONS:
            raise JudgeFailed(
                f"the checks go on asking: {MOST_QUESTIONS} questions in {MOST_ROUNDS} rounds are the most"
            )
        answers = await asyncio.gather(*(self._judge.answer(question) for question in fresh.values()))
        self._answers |= dict(zip(fresh, answers, strict=True))

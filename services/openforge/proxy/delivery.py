"""An answer on its way to one harness, as a stream or whole.

Promises: the terminal event or body is written only when the turn is told; a harness that goes away is noticed at once.
"""

import asyncio
import time

from starlette.types import Receive, Send

from openforge.chat.dialect import Dialect, Head, Problem, Request, Stream
from openforge.proxy.asgi import Whole, gone, json_answer, write
from openforge.proxy.calls import Call, Overflow, Refusal
from openforge.proxy.core import Turn
from openforge.proxy.desk import Desk


def refused(dialect: Dialect, problem: Problem, message: str) -> Whole:
    """A refusal in the dialect's shape. Clients of both large vendors do as `x-should-retry` says; left to themselves
    they repeat a 409.
    """
    repeat = b"true" if problem.may_pass else b"false"
    return json_answer(dialect.error(problem, message), problem.http_status, (b"x-should-retry", repeat))


def words(dialect: Dialect, refusal: Refusal) -> str:
    if isinstance(refusal, Overflow):
        return dialect.overflow(refusal.prompt_tokens, refusal.window)
    return str(refusal)


class Delivery:
    def __init__(self, dialect: Dialect, asked: Request, desk: Desk, found: Call | Turn, keep_alive_s: float) -> None:
        self._dialect = dialect
        self._desk = desk
        self._asked = asked
        self._found = found
        self._keep_alive_s = keep_alive_s
        self._head = Head(
            id=found.id if isinstance(found, Call) else found.request,
            created=int(time.time()),
            model=asked.model,
            prompt_tokens=found.order.placement.prompt_tokens if isinstance(found, Call) else found.prompt_tokens,
        )
        self._stream = dialect.stream(self._head, asked) if asked.stream else None
        self._open = False

    async def __call__(self, receive: Receive, send: Send) -> None:
        if isinstance(self._found, Turn):
            await self._end(self._found, receive, send)
            self._found.received = True
            return
        call = self._found
        with call.listening(stream=self._asked.stream):
            leaving = asyncio.create_task(gone(receive))
            leaving.add_done_callback(call.stir)
            try:
                await self._deliver(call, leaving, receive, send)
            finally:
                leaving.cancel()

    async def _deliver(self, call: Call, leaving: "asyncio.Task[None]", receive: Receive, send: Send) -> None:
        """The answer has arrived, as far as a server can know, if its end was written and the client is still there."""
        if self._stream is not None:
            await self._show(call, self._stream, leaving, send)
        await call.ended(leaving)
        if not call.outcome.done() or call.outcome.cancelled():
            return  # nobody is there any more, or the process ends
        try:
            turn = call.outcome.result()
        except Refusal as refusal:
            await self._problem(refusal, receive, send)
            return
        await self._end(turn, receive, send)
        turn.received = turn.received or not leaving.done()

    async def _show(self, call: Call, stream: Stream, leaving: "asyncio.Task[None]", send: Send) -> None:
        """What is sampled, as it comes, and signs of life while nothing does."""
        thought = told = 0
        clock = asyncio.get_running_loop().time
        silent_since = clock()
        while not call.outcome.done() and not leaving.done():
            reasoning, text = await call.more(thought, told, leaving, silent_since + self._keep_alive_s)
            thought, told = thought + len(reasoning), told + len(text)
            piece = (stream.reasoning(reasoning) if reasoning else b"") + (stream.text(text) if text else b"")
            call.shown = call.shown or bool(piece)
            if not piece and clock() >= silent_since + self._keep_alive_s:
                piece, silent_since = stream.keep_alive(), clock()
            if piece:
                await self._say(send, stream, piece)
                silent_since = clock()

    async def _end(self, turn: Turn, receive: Receive, send: Send) -> None:
        """The terminal event or the body."""
        answer = self._desk.answer(turn, self._asked)
        if self._stream is None:
            await json_answer(self._dialect.encode(self._head, self._asked, answer))(receive, send)
        else:
            await self._say(send, self._stream, self._stream.end(answer), more=False)

    async def _problem(self, refusal: Refusal, receive: Receive, send: Send) -> None:
        said = words(self._dialect, refusal)
        if self._stream is not None and self._open:
            await write(send, self._stream.error(refusal.problem, said), more=False)
        else:
            await refused(self._dialect, refusal.problem, said)(receive, send)

    async def _say(self, send: Send, stream: Stream, piece: bytes, *, more: bool = True) -> None:
        if not self._open:
            self._open = True
            kind = b"text/event-stream" if self._asked.events else b"application/json"
            headers = [(b"content-type", kind), (b"cache-control", b"no-cache")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            piece = stream.start() + piece
        await write(send, piece, more=more)

"""A peer that speaks the engine's wire and answers from a script: real HTTP, no model.

By default it answers `ok` and stops. Log-probs are -0.01, -0.02 and so on, so that each can be recognised.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web
from byte_tokenizer import byte_tokenizer

from openforge.bus.server import free_port
from openforge.wire.generate import GenerateRequest

STOP_ID = 2


def ids_of(text: str) -> list[int]:
    return list(byte_tokenizer().encode(text, add_special_tokens=False).ids)


def stopped(text: str) -> list[int]:
    return [*ids_of(text), STOP_ID]


class StubEngine:
    """`script` gives the ids to answer with. `pace`, as it is when an answer begins, is waited for before each token.

    `fail` calls are answered with `fail_status` first; `break_after` tokens the next answer breaks off, once. `batch`
    tokens are sent at a time. `cached_tokens` is told if it is set. Stop strings that are asked for are honoured.
    """

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []
        self.script: Callable[[GenerateRequest], list[int]] = lambda request: stopped("ok")
        self.pace: Callable[[int], Any] | None = None
        self.fail = 0
        self.fail_status = 500
        self.break_after: int | None = None
        self.version = "0"
        self.called_off = 0
        self.finished = 0
        self.logprob: Callable[[int], float] = lambda index: -(index + 1) / 100
        self.stop_reason: str | None = None
        self.cached_tokens: int | None = None
        self.batch = 1
        self.port = free_port()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def says(self, *texts: str) -> None:
        """Answer the next calls with these texts, the last one for ever."""
        queue = list(texts)
        self.script = lambda request: stopped(queue.pop(0) if len(queue) > 1 else queue[0])

    async def start(self) -> None:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/inference/v1/generate", self._generate)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        request = msgspec.json.decode(await http.read(), type=GenerateRequest)
        self.requests.append(request)
        if self.fail > 0:
            self.fail -= 1
            return web.Response(status=self.fail_status, text="engine is loading")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        try:
            await self._stream(request, response, http)
            self.finished += 1
        except (asyncio.CancelledError, ConnectionResetError):
            self.called_off += 1
            raise
        return response

    async def _stream(self, request: GenerateRequest, response: web.StreamResponse, http: web.Request) -> None:
        pace = self.pace
        ids, stop_reason = _up_to_stop(self.script(request), request.sampling_params.stop)
        stop_reason = self.stop_reason or stop_reason
        limit = request.sampling_params.max_tokens
        finish = "length" if len(ids) > limit else "stop"
        ids = ids[:limit]
        spans: list[dict[str, Any]] = []
        for index in range(0, len(ids), self.batch):
            batch = ids[index : index + self.batch]
            if pace is not None:
                await pace(index)
            if self.break_after is not None and index >= self.break_after:
                self.break_after = None
                assert http.transport is not None
                http.transport.abort()
                return
            if not spans or spans[-1]["version"] != self.version:
                spans.append({"version": self.version, "start": index, "end": index})
            spans[-1]["end"] = index + len(batch)
            last = index + len(batch) == len(ids)
            logprobs = [{"token_id": token, "logprob": self.logprob(place)} for place, token in enumerate(batch, index)]
            choice: dict[str, Any] = {
                "index": 0,
                "token_ids": batch,
                "logprobs": {"content": logprobs},
                "finish_reason": finish if last else None,
                "stop_reason": stop_reason if last else None,
                "weight_versions": spans if last else None,
            }
            prompt = request.token_ids if index == 0 and request.return_token_ids else None
            chunk = {"request_id": "r", "model": "m", "prompt_token_ids": prompt, "choices": [choice]}
            if last and self.cached_tokens is not None:
                chunk["usage"] = {"prompt_tokens_details": {"cached_tokens": self.cached_tokens}}
            await response.write(b"data: " + msgspec.json.encode(chunk) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")


def _up_to_stop(ids: list[int], stops: list[str]) -> tuple[list[int], str | None]:
    """The answer up to the token that completes a stop string, and which one."""
    if not any(stop in byte_tokenizer().decode(ids) for stop in stops):
        return ids, None
    for count in range(1, len(ids) + 1):
        text = byte_tokenizer().decode(ids[:count])
        if found := next((stop for stop in stops if stop in text), None):
            return ids[:count], found
    return ids, None


class Gate:
    """Lets tokens through up to `upto`; everything after `open()`."""

    def __init__(self, upto: int = 0) -> None:
        self._upto = upto
        self._open = asyncio.Event()
        self.reached = asyncio.Event()

    async def __call__(self, index: int) -> None:
        if index >= self._upto:
            self.reached.set()
            await self._open.wait()

    def open(self) -> None:
        self._open.set()

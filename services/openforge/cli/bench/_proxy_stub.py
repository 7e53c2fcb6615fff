"""The engine of `bench proxy`: answers at once what was prepared, as a process of its own.

It speaks the engine's wire for our proxy, streamed, and Chat Completions for other proxies, whole, both with prompt
ids, sampled ids and log-probs as vLLM gives them.
"""

import asyncio
import random
import sys
from itertools import cycle
from pathlib import Path
from typing import Any

import httptools
import msgspec
import uvloop

from openforge.cli.bench._proxy_text import BYTES_PER_TOKEN, tokenizer_of

ANSWERS = 64
SAMPLED_TOKENS = 200
STOP_ID = 2
FIRST_WORD_ID = 300
_GENERATE = b"/inference/v1/generate"


class Answers:
    """Different ones in turn, with log-probs that do not repeat."""

    def __init__(self, model: Path, chunks: int) -> None:
        tokenizer = tokenizer_of(model)
        rng = random.Random(1)
        words = range(FIRST_WORD_ID, tokenizer.get_vocab_size())
        self._streams: list[bytes] = []
        self._wholes: list[bytes] = []
        for _ in range(ANSWERS):
            ids = [*rng.choices(words, k=SAMPLED_TOKENS - 1), STOP_ID]
            logprobs = [round(-rng.expovariate(2.0), 12) for _ in ids]
            self._streams.append(_streamed(ids, logprobs, chunks))
            self._wholes.append(_whole(tokenizer.decode(ids), ids, logprobs))
        self._next = cycle(range(ANSWERS))
        self._prompt = b",".join(b"%d" % rng.choice(words) for _ in range(40_000))

    def generated(self, body: bytes) -> tuple[bytes, bytes]:
        """Content type and body."""
        start = body.index(b'"token_ids":[') + len(b'"token_ids":')
        prompt = body[start : body.index(b"]", start) + 1]
        echo = b'data: {"choices":[],"prompt_token_ids":' + prompt + b"}\n\n"
        return b"text/event-stream", echo + self._streams[next(self._next)]

    def completed(self, body: bytes) -> tuple[bytes, bytes]:
        """With about as many prompt ids as the body has tokens."""
        prompt = self._prompt[: 5 * len(body) // BYTES_PER_TOKEN].rpartition(b",")[0]
        answer = self._wholes[next(self._next)]
        return b"application/json", answer[:-1] + b',"prompt_token_ids":[' + prompt + b"]}"


def _streamed(ids: list[int], logprobs: list[float], chunks: int) -> bytes:
    size = -(-len(ids) // chunks)
    pieces = []
    for start in range(0, len(ids), size):
        end = min(start + size, len(ids))
        choice: dict[str, Any] = {
            "index": 0,
            "token_ids": ids[start:end],
            "logprobs": {"content": _entries(ids[start:end], logprobs[start:end])},
            "finish_reason": "stop" if end == len(ids) else None,
        }
        if end == len(ids):
            choice["weight_versions"] = [{"version": "0", "start": 0, "end": len(ids)}]
        pieces.append(b"data: " + msgspec.json.encode({"choices": [choice]}) + b"\n\n")
    return b"".join(pieces) + b"data: [DONE]\n\n"


def _entries(ids: list[int], logprobs: list[float]) -> list[dict[str, Any]]:
    return [{"token_id": token, "logprob": logprob, "rank": 1} for token, logprob in zip(ids, logprobs, strict=True)]


def _whole(text: str, ids: list[int], logprobs: list[float]) -> bytes:
    content: list[dict[str, Any]] = [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(ids, logprobs, strict=True)
    ]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "logprobs": {"content": content},
        "finish_reason": "stop",
        "token_ids": ids,
    }
    usage = {"prompt_tokens": 8000, "completion_tokens": len(ids), "total_tokens": 8000 + len(ids)}
    head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m"}
    return msgspec.json.encode({**head, "choices": [choice], "usage": usage})


class _Connection(asyncio.Protocol):
    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._parser = httptools.HttpRequestParser(self)
        self._body: list[bytes] = []
        self._url = b""
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._body, self._url = [], b""

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, piece: bytes) -> None:
        self._body.append(piece)

    def on_message_complete(self) -> None:
        asked = b"".join(self._body)
        if self._parser.get_method() == b"GET":
            kind, body = b"application/json", b'{"object":"list","data":[{"id":"m","object":"model"}]}'
        elif self._url.startswith(_GENERATE):
            kind, body = self._answers.generated(asked)
        else:
            kind, body = self._answers.completed(asked)
        head = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n" % (kind, len(body))
        self._transport.write(head + body)


async def serve(port: int, model: Path, chunks: int) -> None:
    answers = Answers(model, chunks)
    server = await asyncio.get_running_loop().create_server(lambda: _Connection(answers), "127.0.0.1", port)
    print("ready", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))

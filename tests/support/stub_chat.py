"""A chat server that says what a script tells it, over real HTTP, and remembers what it was asked."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = str | tuple[int, dict[str, Any]]
"""What the model says, or a status and a JSON body."""


class StubChat:
    def __init__(self, answer: Callable[[dict[str, Any]], Reply]) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.base_url = ""
        self.models: list[str] = []
        self.most_at_once = 0
        self._open = 0
        self._counting = threading.Lock()
        self._answer = answer

    def listing(self) -> tuple[int, dict[str, Any]]:
        """What `GET /models` answers: nothing is there without `models`."""
        if not self.models:
            return 404, {"error": {"message": "there is no such route"}}
        return 200, {"data": [{"id": model} for model in self.models]}

    def respond(self, key: str, request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.keys.append(key)
        with self._counting:
            self.requests.append(request)
            self._open += 1
            self.most_at_once = max(self.most_at_once, self._open)
        reply = self._answer(request)
        with self._counting:
            self._open -= 1
        return (200, _completion(reply)) if isinstance(reply, str) else reply


def scripted(*replies: Reply) -> Callable[[dict[str, Any]], Reply]:
    """One reply after the other, the last one for ever."""
    rest = list(replies)
    return lambda request: rest.pop(0) if len(rest) > 1 else rest[0]


@contextmanager
def stub_chat(answer: Callable[[dict[str, Any]], Reply]) -> Iterator[StubChat]:
    """Serve `answer` on a free port of the loopback until the block ends."""
    chat = StubChat(answer)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        wbufsize = -1  # headers and body in one packet

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self._say(*chat.respond(self.headers.get("Authorization", ""), json.loads(body)))

        def do_GET(self) -> None:
            self._say(*chat.listing())

        def _say(self, status: int, answer: dict[str, Any]) -> None:
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 128
        daemon_threads = True

    server = Server(("127.0.0.1", 0), Handler)
    chat.base_url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield chat
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _completion(text: str) -> dict[str, Any]:
    return {
        "id": "chatcmpl-0",
        "object": "chat.completion",
        "created": 0,
        "model": "policy",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }

"""A JSON service in a few lines: routes, a record of all calls, `/audit` and `/reset`."""

import json
import os
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Route = Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]


class Wrong(ValueError):
    """What the caller asks for cannot be done."""


def serve(prefix: str, fixtures: str, routes: Mapping[str, Route], changes: tuple[str, ...]) -> None:
    """A route gets the state and the body; `changes` are lists of the state that `/audit` shows beside the calls."""
    file = Path(os.environ[fixtures])

    def fresh() -> dict[str, Any]:
        return {**json.loads(file.read_text()), **{name: [] for name in changes}}

    state, calls = fresh(), []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == f"/{prefix}/audit":
                self._say(200, {"calls": calls, **{name: state[name] for name in changes}})
            else:
                self._say(404, {"error": "there is no such route"})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
            if self.path == f"/{prefix}/reset":
                calls.clear()
                state.update(fresh())
                return self._say(200, {"status": "reset"})
            route = routes.get(self.path.removeprefix(f"/{prefix}/"))
            if route is None:
                return self._say(404, {"error": "there is no such route"})
            try:
                status, said = 200, route(state, body)
            except (Wrong, KeyError, TypeError) as error:
                status, said = 422, {"error": f"{type(error).__name__}: {error}"}
            calls.append({"endpoint": self.path, "request_body": body, "response_body": said})
            return self._say(status, said)

        def _say(self, status: int, said: Mapping[str, Any]) -> None:
            text = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            pass

    ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()

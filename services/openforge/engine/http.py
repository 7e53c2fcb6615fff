"""Listening for the engine's wire."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from openforge.service.sockets import bound, host_and_port

ENGINE_URL = "OPENFORGE_ENGINE_URL"
_CLOSING_S = 2
_KEEP_ALIVE_S = 300  # longer than any client keeps a connection, so that it is never us who closes it under a request


def bind(url: str) -> socket.socket:
    """The socket that `OPENFORGE_ENGINE_URL` names; raises `BadSettings` if it cannot be had."""
    return bound(*host_and_port(url, ENGINE_URL), ENGINE_URL, url)


class Server(uvicorn.Server):
    """Signals are the service's business."""

    def __init__(self, app: Any) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            backlog=1024,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_CLOSING_S,
        )
        super().__init__(config)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

"""Listening for the engine's wire."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import uvicorn

from openforge.service import BadSettings

_CLOSING_S = 2
_KEEP_ALIVE_S = 300  # longer than any client keeps a connection, so that it is never us who closes it under a request


def bind(url: str) -> socket.socket:
    """The socket that `OPENFORGE_ENGINE_URL` names; raises `BadSettings` if it cannot be had."""
    host, port = host_and_port(url)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    tcp = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # named, or asyncio leaves Nagle's delay on
    tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        tcp.bind((host, port))
    except OSError as error:
        tcp.close()
        raise BadSettings(
            f"OPENFORGE_ENGINE_URL = {url!r} cannot be listened on ({error.strerror}): use a free port"
        ) from error
    return tcp


def host_and_port(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or parts.port is None:
        raise BadSettings(f"OPENFORGE_ENGINE_URL = {url!r} names no host and port: use http://HOST:PORT")
    return parts.hostname, parts.port


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

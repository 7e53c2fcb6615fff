"""One HTTP request as ASGI brings it: what is read of it, and answers that are there as a whole.

A framework's router, requests and responses cost a call more time than all that is read of it here.
"""

from urllib.parse import parse_qsl

import msgspec
from starlette.types import Message, Receive, Scope, Send

from openforge.chat.dialect import BadRequest

Headers = tuple[tuple[bytes, bytes], ...]


class Gone(Exception):
    """The client went away before its request was whole."""


class Incoming:
    """`headers` have names in small letters; the first of equal ones counts."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query = bytes(scope.get("query_string", b"")).decode("latin-1")
        self.headers: dict[str, str] = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])
        }
        self._receive = receive

    def asked(self, name: str) -> str:
        """The parameter `name` of the query."""
        return dict(parse_qsl(self.query)).get(name, "") if self.query else ""

    async def body(self, most: int) -> bytes:
        """Raises `Gone`, and `BadRequest` for one that is larger than `most`."""
        declared = self.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > most:
            raise BadRequest(f"the body has {declared} bytes: at most {most} are read")
        if self.headers.get("content-encoding", "identity") != "identity":
            raise BadRequest("the body is compressed: send it without Content-Encoding")
        pieces: list[bytes] = []
        size = 0
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Gone
            piece = message.get("body", b"")
            size += len(piece)
            if size > most:
                raise BadRequest(f"the body has more than {most} bytes: that is the most that is read")
            pieces.append(piece)
            more = message.get("more_body", False)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class Whole(msgspec.Struct, frozen=True):
    """An answer that is there as a whole."""

    status: int
    body: bytes = b""
    headers: Headers = ()

    async def __call__(self, receive: Receive, send: Send) -> None:
        headers = [*self.headers, (b"content-length", b"%d" % len(self.body))]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await write(send, self.body, more=False)


def json_answer(body: bytes, status: int = 200, *headers: tuple[bytes, bytes]) -> Whole:
    return Whole(status, body, ((b"content-type", b"application/json"), *headers))


async def write(send: Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def gone(receive: Receive) -> None:
    """Returns when the client has closed the connection."""
    message: Message = {"type": ""}
    while message["type"] != "http.disconnect":
        message = await receive()

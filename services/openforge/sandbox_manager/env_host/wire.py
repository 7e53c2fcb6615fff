"""What manager and env host say to each other: frames of a length and one MessagePack value."""

import asyncio
from typing import Any, Protocol

import msgspec

from openforge.env.contract import EnvCallResult, LlmArgs
from openforge.protos import Isolation
from openforge.sandbox.remote import Reply, Request

_MOST_BYTES = 192 << 20


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The env host is who we started: it knows the secret that we gave it."""

    secret: str


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Run one episode; its sandbox answers to `token`."""

    episode: int
    token: str
    sandbox: str
    isolation: Isolation
    harness: str
    options: dict[str, Any]
    instruction: str
    llm_args: LlmArgs


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    episode: int


class Returned(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    episode: int
    result: EnvCallResult


class Raised(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    episode: int
    text: str
    sandbox_lost: bool


class Call(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    call: int
    token: str
    request: Request


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    call: int
    reply: Reply


ToHost = Begin | Cancel | Answer
ToManager = Hello | Returned | Raised | Call

_encoder = msgspec.msgpack.Encoder()
_to_host = msgspec.msgpack.Decoder(ToHost)
_to_manager = msgspec.msgpack.Decoder(ToManager)


class TooLarge(ValueError):
    """A frame beyond what either side ever sends."""


class Writer(Protocol):
    """What frames are sent by."""

    def write(self, data: bytes) -> None: ...

    async def drain(self) -> None: ...

    def close(self) -> None: ...


async def send(writer: Writer, message: ToHost | ToManager) -> None:
    body = _encoder.encode(message)
    writer.write(len(body).to_bytes(4, "little") + body)
    await writer.drain()


async def receive(reader: asyncio.StreamReader) -> bytes:
    """The next frame; raises `asyncio.IncompleteReadError` at the end of the connection."""
    size = int.from_bytes(await reader.readexactly(4), "little")
    if size > _MOST_BYTES:
        raise TooLarge(f"a frame of {size} bytes")
    return await reader.readexactly(size)


async def next_to_host(reader: asyncio.StreamReader) -> ToHost:
    return _to_host.decode(await receive(reader))


async def next_to_manager(reader: asyncio.StreamReader) -> ToManager:
    return _to_manager.decode(await receive(reader))

"""A terminal over a WebSocket, one JSON frame a message.

The client says `init` first, within ten seconds, then `stdin`, `signal`, `resize`, `close`; we say `ready`, `stdout`,
`exit` or `error`, then close. Frames that are not known are ignored. Promises: whoever leaves takes what it started
with it; output waits for a slow client and is never dropped.
"""

import asyncio
import base64
import binascii
import signal
from contextlib import suppress
from typing import Any

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from openforge.sandbox.contract import Box, SandboxLost, Terminal

_INIT_S = 10.0
_SIGNALS = {name: getattr(signal, f"SIG{name}") for name in ("TERM", "KILL", "INT", "HUP", "QUIT")}


class Init(msgspec.Struct, kw_only=True):
    cmd: list[str]
    type: str = ""
    env: dict[str, str] | None = None
    cwd: str | None = None
    rows: int = 24
    cols: int = 80
    login_shell: bool = False


class Frame(msgspec.Struct, kw_only=True):
    type: str = ""
    data: str = ""
    sig: str = ""
    rows: int = 24
    cols: int = 80


async def serve(websocket: WebSocket, box: Box) -> None:
    await websocket.accept()
    try:
        opened = await _opened(websocket, box)
    except (WebSocketDisconnect, KeyError):
        return
    except (msgspec.MsgspecError, ValueError, TimeoutError, SandboxLost) as error:
        await _fail(websocket, str(error) or "no init frame came in time")
        return
    try:
        await _talk(websocket, opened)
    finally:
        await asyncio.shield(opened.close())


async def _opened(websocket: WebSocket, box: Box) -> Terminal:
    async with asyncio.timeout(_INIT_S):
        init = msgspec.json.decode(await websocket.receive_text(), type=Init)
    if init.type != "init":
        raise ValueError(f"type = {init.type!r}: the first frame must be init")
    argv = ["/bin/bash", "-lic", 'exec "$@"', "-", *init.cmd] if init.login_shell else init.cmd
    if not init.cmd:
        raise ValueError("cmd is empty: name a program")
    return await box.terminal(argv, rows=init.rows, cols=init.cols, cwd=init.cwd or "/workspace", env=init.env or {})


async def _talk(websocket: WebSocket, terminal: Terminal) -> None:
    """Until the command ends or the client leaves."""
    await _say(websocket, type="ready", pid=terminal.pid)
    hearing = asyncio.create_task(_hear(websocket, terminal))
    showing = asyncio.create_task(_show(websocket, terminal))
    try:
        await asyncio.wait({hearing, showing}, return_when=asyncio.FIRST_COMPLETED)
        if showing.done():
            with suppress(WebSocketDisconnect, RuntimeError):
                showing.result()
                await websocket.close()
    finally:
        for task in (hearing, showing):
            task.cancel()
        await asyncio.wait({hearing, showing})


async def _show(websocket: WebSocket, terminal: Terminal) -> None:
    while data := await terminal.read():
        await _say(websocket, type="stdout", data=base64.b64encode(data).decode())
    try:
        await _say(websocket, type="exit", code=await terminal.wait())
    except SandboxLost as lost:
        await _say(websocket, type="error", message=str(lost))


async def _hear(websocket: WebSocket, terminal: Terminal) -> None:
    """Returns when the client is done with it."""
    while True:
        try:
            frame = msgspec.json.decode(await websocket.receive_text(), type=Frame)
        except (WebSocketDisconnect, KeyError):
            return
        except msgspec.MsgspecError:
            continue
        match frame.type:
            case "stdin":
                with suppress(binascii.Error, ValueError):
                    await terminal.write(base64.b64decode(frame.data))
            case "signal" if frame.sig.removeprefix("SIG") in _SIGNALS:
                await terminal.signal(_SIGNALS[frame.sig.removeprefix("SIG")])
            case "resize":
                terminal.resize(frame.rows, frame.cols)
            case "close":
                return


async def _fail(websocket: WebSocket, message: str) -> None:
    with suppress(WebSocketDisconnect, RuntimeError):
        await _say(websocket, type="error", message=message)
        await websocket.close()


async def _say(websocket: WebSocket, **frame: Any) -> None:
    await websocket.send_text(msgspec.json.encode(frame).decode())

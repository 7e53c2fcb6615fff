"""A client of the sandbox API that calls what Orchard's SDK calls, in its order and with its retries."""

import asyncio
import base64
import json
from typing import Any

import aiohttp

KEY = "test-key-of-everything"
_RETRIES = 3


class SdkLikeClient:
    """Keeps its connections, repeats what got no answer after 1 and 2 s (`pause_s` times as long), as the SDK does."""

    def __init__(self, base_url: str, key: str = KEY, *, pause_s: float = 1.0) -> None:
        self.base_url = base_url.rstrip("/")
        self.key = key
        self.pause_s = pause_s
        self.session = aiohttp.ClientSession(headers={"X-API-Key": key})
        self._opened: list[aiohttp.ClientWebSocketResponse] = []

    async def __aenter__(self) -> "SdkLikeClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        for opened in self._opened:
            await opened.close()
        await self.session.close()

    async def request(self, method: str, path: str, **options: Any) -> Any:
        for attempt in range(_RETRIES):
            try:
                async with self.session.request(method, self.base_url + path, **options) as reply:
                    if reply.status == 503 and attempt < _RETRIES - 1:
                        await asyncio.sleep(float(reply.headers["Retry-After"]) * self.pause_s)
                        continue
                    reply.raise_for_status()
                    return await reply.json()
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):
                if attempt == _RETRIES - 1:
                    raise
                await asyncio.sleep(self.pause_s * 2**attempt)
        raise AssertionError("unreachable")

    async def status_of(self, method: str, path: str, **options: Any) -> tuple[int, Any]:
        async with self.session.request(method, self.base_url + path, **options) as reply:
            text = await reply.text()
            return reply.status, json.loads(text) if "json" in reply.headers.get("Content-Type", "") else text

    async def create(self, **fields: Any) -> dict[str, Any]:
        """POST, then the wait on the server; the body of the wait."""
        created = await self.request("POST", "/sandboxes", json={"image": "any", "block_network": True, **fields})
        path = f"/sandboxes/{created['sandbox_id']}/wait"
        waited: dict[str, Any] = await self.request("GET", path, params={"timeout": created["timeout"]})
        assert waited["ready"], waited
        return waited

    async def exec(self, sandbox: str, command: str | list[str], **fields: Any) -> dict[str, Any]:
        """With the wait on the server; on any failure once more without it, then polling."""
        body = {"command": command, "timeout_seconds": None, "cwd": None, "env": None, "login_shell": False, **fields}
        path = f"/sandboxes/{sandbox}/exec"
        try:
            job: dict[str, Any] = await self.request("POST", path, json={**body, "wait": True})
            if job["status"] in ("succeeded", "failed"):
                return job
        except aiohttp.ClientError:
            job = await self.request("POST", path, json=body)
        while True:
            polled: dict[str, Any] = await self.request("GET", f"/jobs/{job['job_id']}")
            if polled["status"] in ("succeeded", "failed"):
                return polled
            await asyncio.sleep(0.1)

    async def terminal(self, sandbox: str, cmd: list[str], **fields: Any) -> "SdkLikeTerminal":
        url = f"{self.base_url}/sandboxes/{sandbox}/exec/pty?api_key={self.key}".replace("http", "ws", 1)
        opened = await self.session.ws_connect(url, heartbeat=30.0, max_msg_size=4 << 20)
        self._opened.append(opened)
        init = {"type": "init", "cmd": cmd, "env": {}, "cwd": None, "rows": 24, "cols": 80, "login_shell": False}
        await opened.send_str(json.dumps({**init, **fields}))
        return SdkLikeTerminal(opened)


class SdkLikeTerminal:
    def __init__(self, opened: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = opened
        self.frames: list[dict[str, Any]] = []

    async def say(self, **frame: Any) -> None:
        await self.socket.send_str(json.dumps(frame))

    async def type(self, text: bytes) -> None:
        await self.say(type="stdin", data=base64.b64encode(text).decode())

    async def until(self, kind: str, holding: bytes = b"") -> dict[str, Any]:
        """The next frame of that kind, or as many as hold the bytes together; its last one."""
        heard = b""
        async with asyncio.timeout(60):
            while True:
                message = await self.socket.receive()
                assert message.type == aiohttp.WSMsgType.TEXT, (message, self.frames)
                frame: dict[str, Any] = json.loads(message.data)
                self.frames.append(frame)
                if frame["type"] == "stdout":
                    heard += base64.b64decode(frame["data"])
                if frame["type"] == kind and holding in heard:
                    return frame


class ReplyDropper:
    """A way to a server on which the first `drops` replies get lost: read here, and the connection closed."""

    def __init__(self, port: int, drops: int) -> None:
        self._to = port
        self.drops = drops
        self._server: asyncio.Server | None = None
        self.url = ""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def stop(self) -> None:
        assert self._server is not None
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._to)
        out = asyncio.create_task(self._out(reader, there_writer))
        try:
            while data := await there_reader.read(65536):
                if self.drops > 0:
                    self.drops -= 1
                    return
                writer.write(data)
                await writer.drain()
        except (ConnectionError, asyncio.CancelledError):
            return
        finally:
            out.cancel()
            there_writer.close()
            writer.close()

    async def _out(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()

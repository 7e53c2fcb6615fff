"""The door: who has no key, or brings too much, is sent away before anything of the request is read."""

from fastapi import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from openforge.sandbox_manager.api.keys import ApiKey, ApiKeys

MOST_BODY_BYTES = 96 << 20  # the largest file, in base64, and what stands around it
_OPEN_PATHS = ("/", "/health", "/openapi.json")


def checked_key(keys: ApiKeys, secret: str | None, *, writes: bool) -> ApiKey:
    """Raises `HTTPException`."""
    if keys.none:
        raise HTTPException(500, "No API keys are configured: set OPENFORGE_SANDBOX_API_KEYS")
    if not secret:
        raise HTTPException(401, "Missing API key: send it as X-API-Key")
    key = keys.find(secret)
    if key is None:
        raise HTTPException(403, "Invalid API key")
    if writes and key.scope == "read":
        raise HTTPException(403, "This API key may only look")
    return key


class Door:
    """ASGI middleware. Terminals are checked where they are opened: their key may be elsewhere."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        try:
            secret = headers.get(b"x-api-key", b"").decode("latin-1")
            checked_key(self._keys, secret, writes=scope["method"] not in ("GET", "HEAD"))
            if int(headers.get(b"content-length", b"0")) > MOST_BODY_BYTES:
                raise _too_large()
            await self._app(scope, _counted(receive), send)
        except HTTPException as refused:
            await JSONResponse({"detail": refused.detail}, refused.status_code)(scope, receive, send)


def _counted(receive: Receive) -> Receive:
    left = MOST_BODY_BYTES

    async def counting() -> Message:
        nonlocal left
        message = await receive()
        left -= len(message.get("body", b""))
        if left < 0:
            raise _too_large()
        return message

    return counting


def _too_large() -> HTTPException:
    return HTTPException(413, f"The request is larger than {MOST_BODY_BYTES} bytes")

"""The text and the images of one message, for every dialect.

Promises: an image is known by the digest of its bytes, or of its URL where the harness sent only that; bytes that
cannot be read are refused with the field that holds them.
"""

import base64
import binascii
import hashlib
from typing import Any
from urllib.parse import unquote_to_bytes

from openforge.chat.contract import Image, Message
from openforge.chat.dialect import BadRequest

_URL_SAFE = str.maketrans("-_", "+/")


class Gathered:
    """Parts of an answer follow one another, others stand on lines of their own. `pictures` are bytes by digest."""

    def __init__(self, role: str) -> None:
        self.pictures: dict[str, bytes] = {}
        self._role = role
        self._join = "" if role == "assistant" else "\n"
        self._texts: list[str] = []
        self._length = 0
        self._images: list[Image] = []

    def write(self, text: str) -> None:
        if text:
            self._length += len(text) + (len(self._join) if self._texts else 0)
            self._texts.append(text)

    def show_url(self, where: str, url: str) -> None:
        """The image behind a URL, which may hold its bytes. `where` is the field that says so."""
        if not url.startswith("data:"):
            self._images.append(Image(digest=_digest(url.encode()), at=self._length))
            return
        head, comma, data = url.removeprefix("data:").partition(",")
        media_type, *options = head.split(";")
        if not comma:
            raise BadRequest(f"{where} is no data URL: it has no comma")
        self._show(media_type, _decoded(where, data) if "base64" in options else unquote_to_bytes(data))

    def show_base64(self, where: str, media_type: str, data: str) -> None:
        self._show(media_type, _decoded(where, data))

    def message(self, *, otherwise: str = "", **more: Any) -> Message:
        """What was gathered; `otherwise` is its text where there was none."""
        return Message(
            role=self._role,  # type: ignore[arg-type]
            content=self._join.join(self._texts) or otherwise,
            images=tuple(self._images),
            **more,
        )

    def _show(self, media_type: str, picture: bytes) -> None:
        digest = _digest(picture)
        self.pictures[digest] = picture
        self._images.append(Image(digest=digest, media_type=media_type, size=len(picture), at=self._length))


def _decoded(where: str, data: str) -> bytes:
    try:
        return base64.b64decode(data.translate(_URL_SAFE), validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRequest(f"{where} is no base64: {error}") from error


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"

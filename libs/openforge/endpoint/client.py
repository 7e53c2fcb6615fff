"""Calls of Chat Completions to somebody else's server.

Promises: never more than `at_once` calls are open; a call that may work later is made again with growing pauses;
what will not work however often says which field is wrong; the key is in no message and no log.
"""

import asyncio
import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import httpx
import msgspec

PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0)
_LONGEST_PAUSE_S = 60.0
_TRY_AGAIN = frozenset({408, 409, 425, 429})
_NO_KEY = frozenset({401, 403})
_NO_MODEL = "model_not_found"
_SHOWN = 300


class EndpointError(Exception):
    """The endpoint gave no answer."""


class EndpointBroken(EndpointError):
    """It is away or overloaded: the same call may work later."""


class EndpointRefused(EndpointError):
    """It will not answer this call. `code` is its own word for why."""

    def __init__(self, message: str, *, status: int = 0, code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class BadEndpoint(EndpointRefused):
    """No call will be answered: url, key or model are wrong. The message names the field, the value and the way out."""


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """`url` ends where `/chat/completions` begins; `key_env` names the variable that holds the key, none where empty.

    `section` is where in the run file all this stands.
    """

    section: str
    url: str
    model: str
    key_env: str = ""

    def key(self) -> str:
        """Raises `BadEndpoint`."""
        if not self.key_env:
            return ""
        key = os.environ.get(self.key_env, "").strip()
        if not key:
            raise BadEndpoint(
                f"{self.section}.key_env = {self.key_env!r}: no such environment variable is set: export it"
            )
        return key


class Endpoint:
    """Use as an async context manager, or call `close`. Raises `BadEndpoint` where the key is not there."""

    def __init__(
        self, address: Address, *, at_once: int = 16, timeout_s: float = 600.0, pauses_s: tuple[float, ...] = PAUSES_S
    ) -> None:
        self.address = address
        key = address.key()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._slots = asyncio.Semaphore(at_once)
        self._pauses_s = pauses_s
        self._client = httpx.AsyncClient(
            base_url=address.url.rstrip("/") + "/",
            headers=headers,
            timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, 30.0)),
            limits=httpx.Limits(max_connections=at_once),
        )

    async def __aenter__(self) -> "Endpoint":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._client.aclose()

    async def check(self) -> None:
        """Whether it is there, takes the key and has the model; raises `BadEndpoint`."""
        try:
            response = await self._client.get("models")
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from error
        if response.status_code in _NO_KEY:
            raise self._no_key(response.status_code)
        known = _model_ids(response)
        if known is None:
            await self._check_by_asking()
        elif self.address.model not in known:
            shown = ", ".join(known[:8]) or "none"
            raise self._bad("model", self.address.model, f"the endpoint does not list it: it has {shown}")

    async def chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one call; `model` is put in. Raises `EndpointError`."""
        async with self._slots:
            for pause_s in self._pauses_s:
                try:
                    return await self._once(body)
                except _Later as later:
                    await asyncio.sleep(pause_s if later.pause_s is None else min(later.pause_s, _LONGEST_PAUSE_S))
            try:
                return await self._once(body)
            except _Later as later:
                raise EndpointBroken(str(later)) from later

    async def _once(self, body: Mapping[str, Any]) -> dict[str, Any]:
        try:
            response = await self._client.post("chat/completions", json={**body, "model": self.address.model})
        except httpx.TransportError as error:
            raise _Later(f"the endpoint broke off: {type(error).__name__}: {error}") from error
        if response.status_code == 200:
            return _object(response)
        self._raise_for(response)
        raise AssertionError("every other status raises")

    def _raise_for(self, response: httpx.Response) -> None:
        """A 403 or 404 may be about this one call: what is in it, or a route that was away for a moment."""
        status, (code, said) = response.status_code, _said(response)
        if status == 401:
            raise self._no_key(status)
        if code == _NO_MODEL:
            raise self._bad("model", self.address.model, f"the endpoint answers {status} to it: {said}")
        if status in _TRY_AGAIN or status >= 500:
            raise _Later(f"the endpoint answered {status}: {said}", _retry_after_s(response))
        raise EndpointRefused(f"the endpoint answered {status}: {said}", status=status, code=code)

    async def _check_by_asking(self) -> None:
        """For those that list no models."""
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
        try:
            await self._once(body)
        except _Later as error:
            raise self._unreachable(error) from error
        except BadEndpoint:
            raise
        except EndpointRefused as refused:
            if refused.status in _NO_KEY:
                raise self._no_key(refused.status) from refused
            if refused.status == 404:
                raise self._bad("model", self.address.model, f"the endpoint answers 404 to it: {refused}") from refused

    def _unreachable(self, error: Exception) -> BadEndpoint:
        why = f"{type(error).__name__}: {error}" if not isinstance(error, _Later) else str(error)
        return self._bad("url", self.address.url, f"it cannot be reached ({why[:_SHOWN]}): check address and network")

    def _no_key(self, status: int) -> BadEndpoint:
        if not self.address.key_env:
            return self._bad(
                "key_env", "", f"the endpoint wants a key (HTTP {status}): name the variable that holds it"
            )
        return self._bad("key_env", self.address.key_env, f"the endpoint refuses that key (HTTP {status}): use another")

    def _bad(self, field: str, value: str, why: str) -> BadEndpoint:
        return BadEndpoint(f"{self.address.section}.{field} = {value!r}: {why}")


class _Later(Exception):
    """Another try may help, after `pause_s` where the endpoint says so."""

    def __init__(self, message: str, pause_s: float | None = None) -> None:
        super().__init__(message)
        self.pause_s = pause_s


def _model_ids(response: httpx.Response) -> list[str] | None:
    """None where the answer is no list of models."""
    if response.status_code != 200:
        return None
    try:
        return [str(model["id"]) for model in response.json()["data"]]
    except (ValueError, KeyError, TypeError):
        return None


def _object(response: httpx.Response) -> dict[str, Any]:
    try:
        answer = response.json()
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise _Later(f"the endpoint answered what is no JSON object: {response.text[:_SHOWN]}")
    return answer


def _said(response: httpx.Response) -> tuple[str, str]:
    """The endpoint's own code and sentence."""
    try:
        error = response.json()["error"]
        return str(error.get("code") or ""), str(error.get("message") or error)[:_SHOWN]
    except (ValueError, KeyError, TypeError, AttributeError):
        return "", response.text[:_SHOWN]


def _retry_after_s(response: httpx.Response) -> float | None:
    try:
        return max(0.0, float(response.headers["retry-after"]))
    except (KeyError, ValueError):
        return None

"""One connection to the bus that outlives breaks, and what can be asked over it.

Promises: it reconnects for ever; a publish is repeated until the stream has answered it; a
question that may be asked twice is asked until it is answered. Only `BusClosed` ends it.
"""

import asyncio
import logging
import re
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import nats
import nats.errors
import nats.js.errors
import nkeys
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext

from openforge.bus.errors import BusClosed, BusError, Denied, NoServer, Refused
from openforge.bus.inbox import Inbox
from openforge.bus.settings import BusSettings

logger = logging.getLogger("openforge.bus")

ACK_TIMEOUT_S = 5.0
RECONNECT_WAIT_S = 0.25
SILENCE = "not a word came"
DENIED = "bus denied"
HEADROOM = 4096  # headers share max_payload with the payload
_OLDEST_SERVER = (2, 11)  # batched direct get
_VIOLATION = re.compile(r'permissions violation for (publish|subscription) to "([^"]+)"')
_SET_UP = "$js.api.stream.create."  # a service that may not make streams asks once, and then waits for them
_FENCED = frozenset({10071, 10164})  # "wrong last sequence", with and without the number
_BREAKS = (
    nats.errors.OutboundBufferLimitError,
    nats.errors.ConnectionReconnectingError,
    nats.errors.StaleConnectionError,
)


class Lost(Exception):
    """The connection broke, or the answer did not come in time: whether it was stored is unknown."""


class NoStream(Exception):
    """Nobody listens on the subject now."""


class Fenced(Exception):
    """The subject holds a message already."""


class _ApiError(msgspec.Struct):
    code: int = 0
    err_code: int = 0
    description: str = ""


class Ack(msgspec.Struct):
    """A stream's answer to a publish."""

    stream: str = ""
    seq: int = 0
    duplicate: bool = False
    error: _ApiError | None = None


_read_ack = msgspec.json.Decoder(Ack).decode


Answer = asyncio.Future[Msg]


class _Question(NamedTuple):
    subject: str
    answer: Answer


class Backoff:
    """Pauses that double from `first_s` to `last_s`."""

    def __init__(self, first_s: float = 0.05, last_s: float = 5.0) -> None:
        self._next_s = first_s
        self._last_s = last_s

    async def pause(self) -> None:
        await asyncio.sleep(self._next_s)
        self._next_s = min(2 * self._next_s, self._last_s)


class Link:
    """`epoch` counts connections: it grows with each reconnect."""

    def __init__(self, settings: BusSettings, name: str) -> None:
        self.settings = settings
        self.name = name
        self.nonce = secrets.token_hex(8)
        self.epoch = 0
        self.client = _Client()
        self.client.link = self
        self.js: JetStreamContext = self.client.jetstream(timeout=ACK_TIMEOUT_S)
        self._up = asyncio.Event()
        self._closed = asyncio.Event()
        self._refused: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._inboxes: set[Inbox] = set()
        self._waiting: dict[str, _Question] = {}
        self._denied: set[str] = set()
        self._deadlines: deque[tuple[float, str]] = deque()
        self._tokens = 0
        self._answers_at = ""
        self._sweeper: asyncio.Task[None] | None = None
        self._last_error: BaseException | None = None

    # -- start, stop

    @classmethod
    async def open(cls, settings: BusSettings, name: str) -> "Link":
        link = cls(settings, name)
        try:
            await link._connect()
        except BaseException:
            await link.close()
            raise
        return link

    async def _connect(self) -> None:
        connecting = asyncio.ensure_future(self.client.connect(**self._options()))
        await asyncio.wait(
            {connecting, self._refused},
            timeout=self.settings.connect_timeout_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if not connecting.done():
            connecting.cancel()
            await asyncio.wait({connecting})
            raise self._no_server()
        await connecting
        version = self.client.connected_server_version
        if (version.major, version.minor) < _OLDEST_SERVER:
            raise NoServer(f"the NATS server at {self.settings.url} is {version}: 2.11 or newer is needed")
        self._answers_at = self.client.new_inbox()
        await self.client.subscribe(f"{self._answers_at}.*", cb=self._on_answer, pending_bytes_limit=0)
        self._sweeper = asyncio.create_task(self._sweep())
        self._up.set()

    def _options(self) -> dict[str, Any]:
        settings = self.settings
        options: dict[str, Any] = {
            "servers": settings.servers(),
            "name": self.name,
            "max_reconnect_attempts": -1,
            "reconnect_time_wait": RECONNECT_WAIT_S,
            "ping_interval": 5,
            "max_outstanding_pings": 2,
            "pending_size": 2 << 20,  # more only delays what could be on its way
            "error_cb": self._on_error,
            "disconnected_cb": self._on_disconnected,
            "reconnected_cb": self._on_reconnected,
            "closed_cb": self._on_closed,
        }
        if context := settings.tls():
            options["tls"] = context
        if settings.creds:
            options["user_credentials"] = settings.creds
        elif settings.nkey_seed_file:
            options["nkeys_seed"] = settings.nkey_seed_file
            options["inbox_prefix"] = inbox_of(public_key(Path(settings.nkey_seed_file).read_bytes()))
        elif settings.user:
            options |= {"user": settings.user, "password": settings.password()}
        return options

    def _no_server(self) -> NoServer:
        url, waited_s = self.settings.url, self.settings.connect_timeout_s
        if self._refused.done():
            return NoServer(
                f"the NATS server at {url} did not let us in ({self._refused.result()}): "
                "set OPENFORGE_NATS_NKEY_SEED_FILE to a seed that it knows"
            )
        why = str(self._last_error or "") or SILENCE
        return NoServer(
            f"no NATS server answered at {url} within {waited_s:g} s ({why}): start one, or set OPENFORGE_NATS_URL"
        )

    async def close(self) -> None:
        self._closed.set()
        if self._sweeper:
            self._sweeper.cancel()
        self._fail_waiting(BusClosed("the connection to the bus was closed"))
        if not self.client.is_closed:
            await self.client.close()

    # -- how the connection is

    @property
    def max_payload(self) -> int:
        return int(self.client.max_payload) - HEADROOM

    async def up(self) -> None:
        """Returns while connected; raises `BusClosed` when that will never be."""
        while not self._up.is_set():
            if self._closed.is_set() or self.client.is_closed:
                raise BusClosed(f"the connection to {self.settings.url} is over: {self._last_error or 'closed'}")
            waits = [asyncio.ensure_future(self._up.wait()), asyncio.ensure_future(self._closed.wait())]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()

    async def _on_error(self, error: BaseException) -> None:
        self._last_error = error
        logger.debug("bus error", extra={"fields": {"error": repr(error)}})
        if violation := _VIOLATION.search(str(error)):
            self._deny(*violation.groups())
            return
        if not self.client.is_connected and self.client._transport:
            self.client._transport.close()  # nats-py leaves a connection open that failed half-way
        refused = isinstance(error, nats.errors.AuthorizationError) or "authorization" in str(error).lower()
        if refused and not self._refused.done():
            self._refused.set_result(error)

    def _deny(self, act: str, subject: str) -> None:
        """The server's word, which nats-py gives in small letters: whoever waits for that subject waits in vain."""
        level = logging.INFO if subject.startswith(_SET_UP) else logging.WARNING
        logger.log(level, DENIED, extra={"fields": {"act": act, "subject": subject}})
        self._denied.add(subject)
        for token, question in list(self._waiting.items()):
            if act == "subscription" or question.subject.lower() == subject:
                self._fail(token, _denied(question.subject))
        for inbox in self._inboxes:
            inbox.stir()

    async def _on_disconnected(self) -> None:
        if self._up.is_set() and not self._closed.is_set():
            logger.warning("bus lost", extra={"fields": {"url": self.settings.url, "error": str(self._last_error)}})
        self._up.clear()
        self._fail_waiting(Lost("the connection broke"))

    async def _on_reconnected(self) -> None:
        self.epoch += 1
        self._denied.clear()
        self._up.set()
        logger.warning("bus back", extra={"fields": {"url": self.settings.url, "epoch": self.epoch}})
        for inbox in self._inboxes:
            inbox.stir()

    async def _on_closed(self) -> None:
        self._up.clear()
        self._closed.set()
        self._fail_waiting(BusClosed("the connection to the bus was closed"))
        for inbox in self._inboxes:
            inbox.stir()

    # -- publish, with an answer

    async def send(self, subject: str, payload: bytes | bytearray, headers: dict[str, str] | None = None) -> Answer:
        """Put a message on its way. The future holds the answer, or `Lost` or `NoStream`.

        The payload is copied before anything else runs, so it may be a buffer that is used again.
        """
        self._tokens += 1
        token = f"{self._tokens:x}"
        future: Answer = asyncio.get_running_loop().create_future()
        self._waiting[token] = _Question(subject, future)
        self._deadlines.append((time.monotonic() + ACK_TIMEOUT_S, token))
        try:
            await self.client.publish(subject, payload, f"{self._answers_at}.{token}", headers)
        except nats.errors.ConnectionClosedError as error:
            self._fail(token, BusClosed(str(error)))
        except (*_BREAKS, OSError) as error:
            self._fail(token, Lost(str(error)))
        return future

    async def publish(self, subject: str, payload: bytes, headers: dict[str, str] | None = None) -> Ack:
        """Stored at least once when this returns. A full stream makes it wait.

        Raises `Fenced` where a fence in the headers holds, `Refused` for what will never be taken.
        """
        await self.up()

        async def send() -> Answer:
            return await self.send(subject, payload, headers)

        return await self.settle(subject, await send(), send)

    async def settle(self, subject: str, answer: Answer, send_again: Callable[[], Awaitable[Answer]]) -> Ack:
        """Wait for the answer to `send`, and send again until there is one."""
        backoff = Backoff(last_s=2.0)
        since = time.monotonic()
        at_once = answer.done()  # an answer that lay here while others were waited for says nothing of now
        while True:
            try:
                ack = _read_ack((await answer).data)
                if ack.error is None:
                    return ack
                self._judge(subject, ack.error)
                why = ack.error.description
            except Lost as error:
                await self.up()
                why = str(error)
            except NoStream:
                await self._expect_stream(subject, since)
                why = "no stream answers"
            waited_s = time.monotonic() - since
            if waited_s > 1:
                logger.warning("telling waits", extra={"fields": {"subject": subject, "s": waited_s, "why": why}})
            if not at_once:
                await backoff.pause()
            at_once = False
            await self.up()
            answer = await send_again()

    def _judge(self, subject: str, error: _ApiError) -> None:
        """Returns where waiting may mend it."""
        if error.err_code in _FENCED:
            raise Fenced(error.description)
        if error.code < 500:
            raise Refused(f"{subject} was refused: {error.description} (error {error.err_code})")

    async def _expect_stream(self, subject: str, since: float) -> None:
        if time.monotonic() - since < self.settings.connect_timeout_s:
            return
        names = await self.ask_api("STREAM.NAMES", {"subject": subject})
        if not names.get("streams"):
            raise Refused(f"no stream takes {subject}: run `openforge bus set-up`, or call `await bus.set_up()` first")

    async def _on_answer(self, message: Msg) -> None:
        question = self._waiting.pop(message.subject[len(self._answers_at) + 1 :], None)
        if question is None or question.answer.done():
            return
        future = question.answer
        if message.headers and message.headers.get("Status") == "503":
            future.set_exception(NoStream(message.subject))
            future.exception()
        else:
            future.set_result(message)

    def _fail(self, token: str, error: Exception) -> None:
        question = self._waiting.pop(token, None)
        if question is not None and not question.answer.done():
            question.answer.set_exception(error)
            question.answer.exception()  # seen: a teller that was cancelled meanwhile leaves nobody to look

    def _fail_waiting(self, error: Exception) -> None:
        for token in list(self._waiting):
            self._fail(token, error)
        self._deadlines.clear()

    async def _sweep(self) -> None:
        """Answers that are late count as lost, and a client that no longer tries to reconnect as closed."""
        while True:
            await asyncio.sleep(0.5)
            trying = self.client._reconnection_task
            if self.client.is_reconnecting and trying is not None and trying.done():
                self._last_error = self._last_error if trying.cancelled() else trying.exception()
                logger.error("bus given up", extra={"fields": {"error": repr(self._last_error)}})
                await self.client.close()
                await self._on_closed()
            now = time.monotonic()
            while self._deadlines and self._deadlines[0][0] < now:
                self._fail(self._deadlines.popleft()[1], Lost(f"no answer within {ACK_TIMEOUT_S:g} s"))

    # -- questions

    async def ask(self, subject: str, payload: bytes = b"") -> Msg:
        """One answer to a question that may be asked twice."""
        backoff = Backoff()
        silent_since: float | None = None
        while True:
            await self.up()
            try:
                return await (await self.send(subject, payload))
            except NoStream:
                silent_since = silent_since or time.monotonic()
                if time.monotonic() - silent_since > self.settings.connect_timeout_s:
                    raise BusError(f"nobody answers {subject}: is JetStream enabled on {self.settings.url}?") from None
            except Lost:
                silent_since = None
            await backoff.pause()

    async def ask_api(self, subject: str, question: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """A JetStream API call; raises `nats.js.errors.APIError` for an answer that is an error."""
        backoff = Backoff()
        while True:
            answer = await self.ask(f"$JS.API.{subject}", msgspec.json.encode(question) if question else b"")
            decoded: dict[str, Any] = msgspec.json.decode(answer.data)
            error = decoded.get("error")
            if error is None:
                return decoded
            if error["code"] != 503:
                raise nats.js.errors.APIError.from_error(error)
            logger.warning("bus not ready", extra={"fields": {"subject": subject, "error": error["description"]}})
            await backoff.pause()

    async def tell_server(self, subject: str, question: Mapping[str, Any], reply: str) -> None:
        """A request whose answers come to an inbox. A break is no error: the inbox stirs then."""
        if subject.lower() in self._denied:
            raise _denied(subject)
        try:
            await self.client.publish(subject, msgspec.json.encode(question), reply)
        except nats.errors.ConnectionClosedError as error:
            raise BusClosed(str(error)) from error
        except (*_BREAKS, OSError) as error:
            logger.debug("bus request not sent", extra={"fields": {"subject": subject, "error": repr(error)}})

    @asynccontextmanager
    async def inbox(self) -> AsyncIterator[Inbox]:
        inbox = Inbox(self.client.new_inbox())
        try:
            subscription = await self.client.subscribe(f"{inbox.subject}.*", cb=inbox.receive, pending_bytes_limit=0)
        except nats.errors.ConnectionClosedError as error:
            raise BusClosed(str(error)) from error
        self._inboxes.add(inbox)
        try:
            yield inbox
        finally:
            self._inboxes.discard(inbox)
            with suppress(nats.errors.Error, OSError):
                await subscription.unsubscribe()


def public_key(seed: bytes) -> str:
    """The public half of an nkey."""
    return str(nkeys.from_seed(bytearray(seed.strip())).public_key.decode())


def inbox_of(key: str) -> str:
    """Where answers to the holder of this public key come; nobody else may be let to listen there."""
    return f"_INBOX.{key}"


def _denied(subject: str) -> Denied:
    return Denied(f"these credentials may not use {subject}: connect with those of the role that may (docs/bus.md)")


class _Client(Client):  # type: ignore[misc]  # nats-py's types are not followed
    """nats-py's client, asking over the link, and forgetting no cancellation: a worker that nobody could stop any more.

    Its own `request` waits with `asyncio.wait_for`, which on Python 3.11 forgets one that comes together with the
    answer, and its flush swallows one that comes while it waits for the socket.
    """

    link: "Link"

    async def _flush_pending(self, force_flush: bool = False) -> Any:
        task = asyncio.current_task()
        cancellations = task.cancelling() if task else 0
        flushed = await super()._flush_pending(force_flush)
        if task and task.cancelling() > cancellations:
            raise asyncio.CancelledError
        return flushed

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        timeout: float = ACK_TIMEOUT_S,
        old_style: bool = False,
        headers: dict[str, Any] | None = None,
    ) -> Msg:
        try:
            async with asyncio.timeout(timeout):
                return await (await self.link.send(subject, payload, headers))
        except (TimeoutError, Lost):
            raise nats.errors.TimeoutError from None
        except NoStream:
            raise nats.errors.NoRespondersError from None

"""One exec in a pod, over its WebSocket, carried between its thread and the event loop.

Promises: a flood costs at most the cap; output that nobody reads stops the command, where that is asked for; how the
command ended is known from our own last words in its output, after all of it, else from the server's status; nothing
waits for a background process that holds the streams, and no byte of a terminal for the next one.

Reference: the channels of `v5.channel.k8s.io` and `v4.channel.k8s.io`; of the client's `WSClient` only `update`,
`read_channel` and `write_channel` are used, since its `returncode` fails where no status came.
"""

import asyncio
import functools
import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import yaml
from kubernetes import client
from kubernetes.stream import ws_client
from websocket import WebSocketException

from openforge.sandbox.contract import SandboxLost
from openforge.sandbox.inside.frames import frame
from openforge.sandbox.kubernetes.pod import INIT

_CHUNK = 1 << 15
_TURN_S = 0.5
_OUT, _ERR, _STATUS = 1, 2, 3


class Until:
    """Passes a stream on until the nonce, and keeps what comes after it."""

    def __init__(self, nonce: bytes, take: Callable[[bytes], None]) -> None:
        self._nonce = nonce
        self._take = take
        self._held = b""
        self.found = False

    def add(self, data: bytes) -> None:
        self._held += data
        if self.found:
            return
        at = self._held.find(self._nonce)
        if at >= 0:
            self.found = True
            self._take(self._held[:at])
            self._held = self._held[at + len(self._nonce) :]
        else:
            clear = len(self._held) - self._begun()
            self._take(self._held[:clear])
            self._held = self._held[clear:]

    def _begun(self) -> int:
        """How many bytes at the end may be the nonce's first."""
        longest = min(len(self._held), len(self._nonce) - 1)
        return next((n for n in range(longest, 0, -1) if self._held.endswith(self._nonce[:n])), 0)

    @property
    def after(self) -> bytes:
        return self._held if self.found else b""

    def flush(self) -> None:
        if not self.found:
            self._take(self._held)
            self._held = b""

    def is_whole(self, words: list[bytes]) -> bool:
        return self.found


class Counted:
    """Passes a terminal's output on as it comes, and knows that it was all from our last words, which say how much."""

    def __init__(self, take: Callable[[bytes], None]) -> None:
        self._take = take
        self._said = 0

    def add(self, data: bytes) -> None:
        self._said += len(data)
        self._take(data)

    def flush(self) -> None:
        """Nothing is held."""

    def is_whole(self, words: list[bytes]) -> bool:
        return self._said >= int(words[2])


class Ended:
    """How a command ended. `code` is negative where a signal did it."""

    def __init__(self, code: int, memory_kills: int) -> None:
        self.code = code
        self.memory_kills = memory_kills


class Order:
    """One order to the pod. `out` and `err` take what comes, in the thread; `end` is set in the loop."""

    def __init__(
        self,
        number: int,
        work: Sequence[bytes],
        stdin: bytes,
        out: Callable[[bytes], None],
        err: Callable[[bytes], None],
    ) -> None:
        self.nonce = b"\0" + secrets.token_bytes(15)  # no digit and no line's end, which is all that our words are
        self.head = frame(self.nonce, b"%d" % number, b"%d" % len(stdin), *work)
        self.stdin = stdin
        self.out: Until | Counted = Counted(out) if work[0] == b"terminal" else Until(self.nonce, out)
        self.err = Until(self.nonce, err)


class Stream:
    """Runs one order in a thread of its own."""

    def __init__(self, configuration: Any, namespace: str, pod: str, order: Order) -> None:
        self._configuration = configuration
        self._namespace = namespace
        self._pod = pod
        self._order = order
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[Ended] = self._loop.create_future()
        self.ended.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._closing = False
        self._writing = threading.Lock()
        self._ws: Any = None
        self._waiting: list[bytes] = []
        self._thread = threading.Thread(target=self._run, name="exec", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Nobody wants to know any more."""
        self._closing = True

    def send(self, data: bytes) -> None:
        """To its standard input, from a thread; before the connection stands, later."""
        with self._writing:
            if self._ws is None:
                self._waiting.append(data)
                return
            for at in range(0, len(data), _CHUNK):
                with suppress(WebSocketException, OSError):
                    self._ws.write_channel(0, data[at : at + _CHUNK])

    def _run(self) -> None:
        try:
            ended = self._talk()
        except Exception as error:  # the client fails in many ways; whoever waits in the loop must learn of each
            reason = getattr(error, "reason", "") or error
            self._tell(SandboxLost(f"{self._pod}: the command's connection broke: {reason}"))
        else:
            self._tell(ended)

    def _tell(self, how: "Ended | SandboxLost") -> None:
        def settle() -> None:
            if not self.ended.done():
                if isinstance(how, Ended):
                    self.ended.set_result(how)
                else:
                    self.ended.set_exception(how)

        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(settle)

    def _talk(self) -> Ended:
        ws = self._connect()
        try:
            feeding = threading.Thread(target=self._feed, args=(ws,), name="stdin", daemon=True)
            feeding.start()
            while ws.is_open() and not self._closing and not self._said_all():
                ws.update(timeout=_TURN_S)
                self._take(ws)
            self._take(ws)
            return self._how(ws)
        finally:
            with suppress(WebSocketException, OSError):
                ws.sock.send_close()
            ws.sock.shutdown()  # `close` would leave the socket open where the other side was first

    def _connect(self) -> Any:
        """A client of its own: the way to a WebSocket changes what its calls do."""
        api = client.ApiClient(self._configuration)
        api.request = functools.partial(ws_client.websocket_call, self._configuration, binary=True, capture_all=False)
        return client.CoreV1Api(api).connect_get_namespaced_pod_exec(
            self._pod,
            self._namespace,
            container="box",
            command=[*INIT, "once"],
            stdin=True,
            stdout=True,
            stderr=True,
            tty=False,
            _preload_content=False,
        )

    def _feed(self, ws: Any) -> None:
        """While output is read, or both sides would wait for each other."""
        with self._writing:
            for data in (self._order.head, self._order.stdin, *self._waiting):
                for at in range(0, len(data), _CHUNK):
                    with suppress(WebSocketException, OSError):
                        ws.write_channel(0, data[at : at + _CHUNK])
            self._ws = ws

    def _take(self, ws: Any) -> None:
        for channel, until in ((_OUT, self._order.out), (_ERR, self._order.err)):
            if data := ws.read_channel(channel):
                until.add(data)

    def _said_all(self) -> bool:
        words = self._order.err.after
        return words.endswith(b"\n") and self._order.out.is_whole(words.split())

    def _how(self, ws: Any) -> Ended:
        if self._said_all():
            code, kills, *_ = self._order.err.after.split()
            return Ended(int(code), int(kills))
        self._order.out.flush()
        self._order.err.flush()
        if self._closing:
            raise SandboxLost("it was given up")
        return status_of(ws.read_channel(_STATUS))


def status_of(told: bytes) -> Ended:
    """From channel 3, where our process beside the command did not live to tell: killed with all, or never begun."""
    status = yaml.safe_load(told) if told else None
    if not isinstance(status, dict):
        raise SandboxLost("the connection ended without a status")
    if status.get("status") == "Success":
        return Ended(0, 0)
    causes = (status.get("details") or {}).get("causes") or [{}]
    code = str(causes[0].get("message", ""))
    if status.get("reason") != "NonZeroExitCode" or not code.isdigit():
        raise SandboxLost(str(status.get("message") or status))
    return Ended(128 - int(code) if int(code) > 128 else int(code), 0)

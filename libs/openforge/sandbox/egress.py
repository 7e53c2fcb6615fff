"""The HTTP proxy by which sandboxes of network `allowlist` and `open` reach the world.

Promises: whatever name a sandbox gives, the address that it leads to is judged and then dialled, not looked up
twice; addresses of this host and of private networks are refused unless the list names them as addresses; what
is refused is said so, with the host, by status 403.
"""

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from openforge.sandbox.contract import NETWORKS, Network
from openforge.sandbox.door import Door, pump

EGRESS_PORT = 3128
_WEB_PORTS = (80, 443)
_HEAD_S = 30.0
_DIAL_S = 10.0
_HOP_HEADERS = (b"connection:", b"proxy-connection:", b"proxy-authorization:", b"keep-alive:")


class Refused(Exception):
    """The destination may not be reached, or cannot be; the text says which and why."""


def proxy_env(port: int = EGRESS_PORT) -> dict[str, str]:
    """What makes ordinary programs use the proxy on this port of the sandbox."""
    names = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
    own = dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost")
    return {**dict.fromkeys(names, f"http://127.0.0.1:{port}"), **own}


def check_network(network: str, hosts: Sequence[str]) -> None:
    """Raises `ValueError` naming the field."""
    if network not in NETWORKS:
        raise ValueError(f"network = {network!r}: use one of {', '.join(NETWORKS)}")
    if hosts and network != "allowlist":
        raise ValueError(f"hosts = {list(hosts)}, but network = {network!r}: use network = 'allowlist'")
    Rules("allowlist", hosts)


class Rules:
    """Which destinations a sandbox may reach. `hosts` as in `SandboxSpec`; raises `ValueError` naming a bad entry."""

    def __init__(self, network: Network, hosts: Sequence[str]) -> None:
        self._open = network == "open"
        self._entries = [_entry(host) for host in hosts]

    def check_name(self, host: str, port: int) -> None:
        """Raises `Refused`."""
        if not self._open and not self._listed(host, port):
            raise Refused(f"{host}:{port} is not among the hosts that this sandbox may reach")

    def check_address(self, address: str, host: str, port: int) -> None:
        """`address` is what `host` leads to; raises `Refused`."""
        if not _is_public(address) and not (_is_address(host) and self._listed(host, port)):
            raise Refused(f"{host}:{port} leads to {address}, which is no public address")

    def _listed(self, host: str, port: int) -> bool:
        return any(_matches(pattern, host) and port in ports for pattern, ports in self._entries)


def _entry(text: str) -> tuple[str, tuple[int, ...]]:
    host, colon, port = text.strip().lower().rpartition(":")
    if not colon or _is_address(text.strip()):
        host, port = text.strip().lower(), ""
    host = host.strip("[]")
    bare = host.removeprefix("*.")
    fits = bare and "*" not in bare and "/" not in bare and not any(c.isspace() for c in bare)
    if not fits or (port and not (port.isdigit() and 0 < int(port) < 65536)):
        raise ValueError(f"hosts has {text!r}: write a name, *.name or an address, with :port if it is not 80 or 443")
    return host, (int(port),) if port else _WEB_PORTS


def _matches(pattern: str, host: str) -> bool:
    if pattern.startswith("*."):
        return host.endswith(pattern[1:])
    return host == pattern


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def _is_public(address: str) -> bool:
    """Also for addresses of version 4 that are written as, or carried in, ones of version 6."""
    known = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(known, ipaddress.IPv6Address):
        inner = known.ipv4_mapped or known.sixtofour or (known.teredo or (None, None))[1]
        if inner is not None:
            known = inner
        elif known in ipaddress.ip_network("64:ff9b::/96"):
            known = ipaddress.IPv4Address(int(known) & 0xFFFFFFFF)
    return known.is_global and not known.is_multicast


class Egress(Door):
    """Serves one sandbox's listening socket."""

    def __init__(self, rules: Rules) -> None:
        super().__init__()
        self._rules = rules

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._forward(reader, writer)
        except Refused as refused:
            _answer(writer, b"403 Forbidden", str(refused))

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(_HEAD_S):
            head = await reader.readuntil(b"\r\n\r\n")
        request, *headers = head[:-4].split(b"\r\n")
        words = request.split(b" ")
        if len(words) != 3:
            _answer(writer, b"400 Bad Request", "this is an HTTP proxy")
            return
        method, target, version = words
        host, port, path = _destination(method, target.decode("latin-1"))
        there_reader, there_writer = await self._dial(host, port)
        try:
            if method == b"CONNECT":
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            else:
                there_writer.write(_forwarded(method, path, version, headers))
            await _carry((reader, writer), (there_reader, there_writer))
        finally:
            there_writer.close()

    async def _dial(self, host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        self._rules.check_name(host, port)
        failure: Exception | None = None
        for address in await _addresses(host, port):
            try:
                self._rules.check_address(address, host, port)
                async with asyncio.timeout(_DIAL_S):
                    return await asyncio.open_connection(address, port)
            except (Refused, OSError, TimeoutError) as error:
                failure = failure or error
        if isinstance(failure, Refused):
            raise failure
        raise Refused(f"{host}:{port} cannot be reached: {failure or 'it has no address'}")


async def _addresses(host: str, port: int) -> list[str]:
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise Refused(f"{host}:{port} cannot be reached: {error}") from error
    return list(dict.fromkeys(str(info[4][0]) for info in found))


def _destination(method: bytes, target: str) -> tuple[str, int, str]:
    """(host, port, path) of a request to a proxy; raises `Refused`."""
    try:
        url = urlsplit(f"//{target}" if method == b"CONNECT" else target)
        host, port = (url.hostname or "").lower().rstrip("."), url.port
    except ValueError:
        raise Refused(f"{target[:200]!r} names no host and port") from None
    if not host or (method != b"CONNECT" and url.scheme != "http"):
        raise Refused(f"{target[:200]!r} is no address for a proxy: use http://HOST/... or CONNECT HOST:PORT")
    path = (url.path or "/") + (f"?{url.query}" if url.query else "")
    return host, port or (443 if method == b"CONNECT" else 80), path


def _forwarded(method: bytes, path: str, version: bytes, headers: Sequence[bytes]) -> bytes:
    """One request a connection, so that the next one is judged anew."""
    kept = [line for line in headers if not line.lower().startswith(_HOP_HEADERS)]
    lines = [b" ".join((method, path.encode("latin-1"), version)), *kept, b"Connection: close"]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def _answer(writer: asyncio.StreamWriter, status: bytes, text: str) -> None:
    body = text.encode("utf-8", "replace") + b"\n"
    head = b"HTTP/1.1 %b\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
    with contextlib.suppress(OSError):
        writer.write(head % (status, len(body)) + body)


Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _carry(here: Ends, there: Ends) -> None:
    """Until the far side has said all it has to say."""
    out = asyncio.create_task(pump(here[0], there[1]))
    try:
        await pump(there[0], here[1])
    finally:
        out.cancel()
        with contextlib.suppress(asyncio.CancelledError, OSError):
            await out

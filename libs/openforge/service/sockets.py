"""Sockets that a service listens on.

Promises: an address that is malformed or taken is a bad setting, named with its variable, its value and the way out.
"""

import socket
from urllib.parse import urlsplit

from openforge.bus.settings import BadSettings


def host_and_port(url: str, setting: str) -> tuple[str, int]:
    """Of `http://HOST:PORT`; raises `BadSettings` in the name of `setting`."""
    malformed = BadSettings(f"{setting} = {url!r} names no host and port: use http://HOST:PORT")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise malformed from error
    if parts.scheme != "http" or not host or port is None:
        raise malformed
    return host, port


def bound(host: str, port: int, setting: str, value: object, *, shared: bool = False) -> socket.socket:
    """A TCP socket at this address; raises `BadSettings` in the name of `setting` if it cannot be had.

    With `shared` other processes of the same user that ask for it too may have the address as well.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    tcp = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # named, or asyncio leaves Nagle's delay on
    tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        tcp.bind((host, port))
    except OSError as error:
        tcp.close()
        raise BadSettings(f"{setting} = {value!r} cannot be listened on ({error.strerror}): use a free port") from error
    return tcp

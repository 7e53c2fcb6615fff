"""Where the proxy listens: a TCP port and a UNIX socket that every sandbox user may connect to.

Promises: an address that cannot be had is a bad setting; a path that a dead proxy left is taken over at once. Proxies
of one run may share both: the kernel spreads connections to the port over them, and the path leads to one of them, to
another one soon after that one died.
"""

import asyncio
import secrets
import socket
from pathlib import Path

from openforge.proxy.settings import Settings
from openforge.service.sockets import bound, host_and_port

BACKLOG = 1024
TAKE_OVER_S = 0.5
"""How often a proxy looks whether the path still leads to a living one."""
_ANY_SANDBOX = 0o666
_THIS_PROCESS = secrets.token_hex(4)
"""In containers every proxy has pid 1."""


def shared(settings: Settings) -> bool:
    """Whether other proxies work for the same run, and may listen at the same places."""
    return settings.proxy_replicas > 1


def listen(settings: Settings) -> list[socket.socket]:
    """Raises `BadSettings`."""
    setting = "OPENFORGE_PROXY_URL"
    address = host_and_port(settings.proxy_url, setting)
    tcp = bound(*address, setting, settings.proxy_url, shared=shared(settings))
    path = socket_path(settings)
    sockets = [tcp] if path is None else [tcp, _unix_socket(path, shared=shared(settings))]
    for each in sockets:
        each.listen(BACKLOG)
    return sockets


def socket_path(settings: Settings) -> Path | None:
    return Path(settings.sockets) / "proxy.sock" if settings.sockets else None


async def take_over(path: Path) -> None:
    """Put this process's socket in place whenever nobody answers there."""
    while True:
        await asyncio.sleep(TAKE_OVER_S)
        if not _is_answered(path):
            _put_in_place(path)


def _unix_socket(path: Path, *, shared: bool) -> socket.socket:
    """In place at once, also where a dead proxy left its own. One that is shared keeps a name of its own beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _sweep(path)
    own, draft = _own(path), _draft(path)
    draft.unlink(missing_ok=True)
    unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    unix.bind(str(draft))
    draft.chmod(_ANY_SANDBOX)
    unix.listen(BACKLOG)  # before it has its name, or a proxy that starts now would sweep it away
    draft.replace(own)
    if shared:
        _put_in_place(path)
    else:
        own.replace(path)
    return unix


def _own(path: Path) -> Path:
    return path.with_name(f".{path.name}.{_THIS_PROCESS}")


def _draft(path: Path) -> Path:
    return path.with_name(f".{path.name}-{_THIS_PROCESS}")


def _sweep(path: Path) -> None:
    """The names of proxies that are gone."""
    for name in path.parent.glob(f".{path.name}.*"):
        if not _is_answered(name):
            name.unlink(missing_ok=True)


def _put_in_place(path: Path) -> None:
    second = _draft(path)
    second.unlink(missing_ok=True)
    second.hardlink_to(_own(path))
    second.replace(path)


def _is_answered(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as unix:
        unix.setblocking(False)
        try:
            unix.connect(str(path))
        except BlockingIOError:
            return True  # so many wait to be served that nobody else can be added
        except OSError:
            return False
    return True

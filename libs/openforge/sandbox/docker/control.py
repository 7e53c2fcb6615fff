"""The socket on which a container's init reports, once.

Promises: one connection is taken and then nobody can connect any more; only the container is shown the socket, and
no other user of this host can reach it.
"""

import asyncio
import os
import shutil
import socket
import struct
from pathlib import Path

from openforge.sandbox.docker.container import CONTROL_FOLDER

_NAME = "control"
INSIDE = f"{CONTROL_FOLDER}/{_NAME}"


class Doorbell:
    """`folder` is made, shown to the container as `CONTROL_FOLDER`, and gone with `close`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o755)
        folder.chmod(0o755)
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.setblocking(False)
        _bind(self._listening, folder)
        self._listening.listen(1)

    async def answer(self) -> tuple[socket.socket, int]:
        """The connection of the init, and its process number on this host (0 where it has none here)."""
        sock, _ = await asyncio.get_running_loop().sock_accept(self._listening)
        packed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, _, _ = struct.unpack("3i", packed)
        return sock, pid

    def close(self) -> None:
        self._listening.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _bind(listening: socket.socket, folder: Path) -> None:
    """By way of the folder's descriptor: the path of a socket may have 107 bytes, a folder of ours may have more."""
    fd = os.open(folder, os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        listening.bind(f"/proc/self/fd/{fd}/{_NAME}")
    finally:
        os.close(fd)
    (folder / _NAME).chmod(0o666)  # the container's user is not ours

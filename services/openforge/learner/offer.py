"""The learner's own process that broadcasts weights, kept alive.

Promises: its address stays the same while the learner lives; where it cannot be, the learner says so before it trains.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import sys
from pathlib import Path
from typing import NoReturn

from openforge.learner.backends.contract import BackendRefused
from openforge.runs import RunConfig
from openforge.service import ends_with_us, log

_RESTART_PAUSE_S = 1.0


class Offer:
    """`address` is what is told with each published version, empty where engines read folders."""

    def __init__(self, config: RunConfig, root: Path, listen: str) -> None:
        self._transport = config.engine.weight_path
        self._root = root.absolute()
        self.address = "" if self._transport == "disk" else _address(listen)
        if self._transport == "nccl":
            _refuse_without_gpu()

    async def keep(self) -> NoReturn:
        """Until it is cancelled; the kernel ends the process with the learner."""
        while True:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "openforge.learner.broadcast", "--root", str(self._root)),
                *("--listen", self.address, "--transport", self._transport),
                env={**os.environ, "CUDA_VISIBLE_DEVICES": _first_device()} if self._transport == "nccl" else None,
                preexec_fn=ends_with_us(),
            )
            try:
                code = await process.wait()
            except asyncio.CancelledError:
                process.kill()
                await process.wait()
                raise
            log.error("broadcasting ended, starting it again", code=code, address=self.address)
            await asyncio.sleep(_RESTART_PAUSE_S)


def _address(listen: str) -> str:
    """HOST:PORT, with a free port where the port is 0. Raises `BackendRefused` where nobody could meet there."""
    host, _, port = listen.rpartition(":")
    refused = BackendRefused(
        f"OPENFORGE_BROADCAST_LISTEN = {listen!r}: use HOST:PORT that engines can reach, with a free port"
    )
    if not (host and port.isdecimal()):
        raise refused
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except (OSError, OverflowError, UnicodeError) as error:
            raise refused from error
        at, free = probe.getsockname()[:2]
    if ipaddress.ip_address(at.partition("%")[0]).is_unspecified:  # every address of this host is none to be called at
        raise refused
    return f"{host}:{free}"


def _first_device() -> str:
    """The GPU of rank 0, on which the weights' tensors pass through."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]


def _refuse_without_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise BackendRefused(
            'engine.weight_path = "nccl": torch sees no CUDA device where the learner is; write "disk", or "gloo" to '
            "broadcast without GPUs"
        )

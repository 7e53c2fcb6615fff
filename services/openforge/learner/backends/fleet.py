"""One backend over several processes: rank 0 decides, the others follow.

Promises: every collective begins with a broadcast of what is to be done, so no rank waits for one that
does something else; followers end with rank 0, and rank 0 with any of them that ends before it is told to.

Under torchrun the ranks exist already. Otherwise rank 0 starts the others beside itself on this machine.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from openforge.learner.backends.contract import BackendRefused, StepStats
from openforge.learner.packing import TrainSequence
from openforge.runs import RunConfig, config_of
from openforge.runs.load import canonical
from openforge.service import BAD_SETTINGS, FAILED, OK, BadSettings, ends_with_us, log

if TYPE_CHECKING:
    from torch import Tensor

_GRACE_S = 10.0
"""So long rank 0 has to find out by itself, and to say more, that a rank is gone or refuses its settings."""

IDLE = timedelta(days=30)
"""How long a follower waits for the next command: pauses of a run are no failure."""


def is_follower() -> bool:
    return int(os.environ.get("RANK", "0")) > 0


class Fleet:
    """A `Backend` of rank 0 that takes the other ranks along."""

    def __init__(self, config: RunConfig) -> None:
        from openforge.learner.backends.choose import backend_of_rank

        self._children = _start_others(config.learner.world_size)
        self._closing = threading.Event()
        for rank, child in enumerate(self._children, start=1):
            threading.Thread(target=self._watch, args=(rank, child), daemon=True).start()
        _join()
        _broadcast(canonical(config)[0])
        self._own = backend_of_rank(config)
        self.vocabulary = self._own.vocabulary
        self.takes = self._own.takes
        self.mixture = self._own.mixture

    def train(self, sequences: Sequence[TrainSequence], step: int) -> StepStats:
        _broadcast(("train", (without_routing(sequences), step)))
        return self._own.train(sequences, step)

    def logprobs(self, sequences: Sequence[TrainSequence]) -> list[list[float]]:
        _broadcast(("logprobs", (sequences,)))
        return self._own.logprobs(sequences)

    def export(self) -> Mapping[str, Tensor]:
        _broadcast(("export", ()))
        return self._own.export()

    def adapters(self) -> Mapping[str, Tensor]:
        _broadcast(("adapters", ()))
        return self._own.adapters()

    def plain_model(self) -> Any:
        return self._own.plain_model()

    def save(self, folder: Path) -> None:
        _broadcast(("save", (folder,)))
        self._own.save(folder)

    def load(self, folder: Path) -> None:
        _broadcast(("load", (folder,)))
        self._own.load(folder)

    def _watch(self, rank: int, child: subprocess.Popen[bytes]) -> None:
        """A rank that is gone before all have met is waited for in C++ as long as `IDLE`: nothing else would end us."""
        code = child.wait()
        if not self._closing.wait(_GRACE_S):
            log.error("rank ended", rank=rank, exit_code=code)
            os._exit(BAD_SETTINGS if code == BAD_SETTINGS else FAILED)

    def close(self) -> None:
        import torch.distributed as dist

        self._closing.set()
        _broadcast(("close", ()))
        dist.barrier()
        dist.destroy_process_group()
        for child in self._children:
            child.wait(timeout=30)


def without_routing(sequences: Sequence[TrainSequence]) -> list[TrainSequence]:
    """What all ranks are told of. Experts weigh more than tokens: each rank is told of those of its own rows, later."""
    return [one if one.routing is None else msgspec.structs.replace(one, routing=None) for one in sequences]


def follow() -> NoReturn:
    """The life of every rank but 0."""
    import torch.distributed as dist

    from openforge.learner.backends.choose import backend_of_rank
    from openforge.service import die_with_parent, set_up_logs

    set_up_logs(f"learner.{os.environ['RANK']}")
    die_with_parent()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # rank 0 still needs us for its last checkpoint, and ends us
    _join()
    code = OK
    try:
        backend = backend_of_rank(config_of(_broadcast(None)))
        while (command := _broadcast(None))[0] != "close":
            name, arguments = command
            getattr(backend, name)(*arguments)
        dist.barrier()
    except BadSettings as error:
        log.error("bad settings", why=str(error))
        code = BAD_SETTINGS  # which rank 0 hands on where it does not find out by itself
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # destroying the group while others still talk aborts the process now and then


def _join() -> None:
    import torch
    import torch.distributed as dist

    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=IDLE)


def _broadcast(what: Any) -> Any:
    """From rank 0 to all. The others pass None and get what rank 0 passed."""
    import torch
    import torch.distributed as dist

    box = [what]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


def _start_others(world_size: int) -> list[subprocess.Popen[bytes]]:
    if (given := os.environ.get("WORLD_SIZE")) is not None:
        if int(given) != world_size:
            raise BackendRefused(
                f"learner.world_size = {world_size}, but torchrun started {given} processes: make them equal."
            )
        _expect_store_of_its_own()
        return []
    shared = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    os.environ.update(shared, RANK="0", LOCAL_RANK="0")
    return [
        subprocess.Popen(
            [sys.executable, "-m", "openforge.learner"],
            env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            preexec_fn=ends_with_us(),
        )
        for rank in range(1, world_size)
    ]


def _expect_store_of_its_own() -> None:
    """torchrun keeps one store over all its restarts: a rank that is started again finds where the dead ones were."""
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if shared and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")):
        raise BackendRefused(
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE is not 1, and torchrun has --max-restarts: ranks that it starts again "
            "would look for those that are gone; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun."
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

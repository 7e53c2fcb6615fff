"""The receiving end of weights that a learner broadcasts: torch alone, with gloo on a CPU and NCCL on GPUs.

Promises: what comes out is what the learner has under the digest that was asked for, tensor by tensor in its order, or
`Refused`; the same code runs over both transports.

The sending end is `openforge.learner.broadcast`. Both meet at the learner's TCPStore: the first worker asks to be
linked, all make a process group in which the learner is rank 0, and then the first worker asks for one version after
another. An answer is the length of a header, the header (JSON), and the buckets that it lists.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

LINKS = "links"
TIMEOUT = timedelta(seconds=120)


class Refused(RuntimeError):
    """The learner does not have what was asked for."""


@dataclass(frozen=True)
class Stream:
    """Where a version can be had: `address` is the learner's store, `link` names this server's group, of `world`
    processes with the learner; `digest` is that of the version's manifest. A link takes the place of the one that was
    announced for the same `engine` before, if that has a name."""

    address: str
    link: str
    world: int
    transport: str
    digest: str
    engine: str = ""


def link_key(number: int) -> str:
    return f"link/{number}"


def ask_key(link: str, number: int) -> str:
    return f"ask/{link}/{number}"


def store_at(address: str) -> dist.TCPStore:
    host, _, port = address.rpartition(":")
    return dist.TCPStore(host, int(port), is_master=False, timeout=TIMEOUT)


def group_of(transport: str, store: dist.Store, link: str, rank: int, world: int) -> Any:
    """A process group apart from all others of this process."""
    own = dist.PrefixStore(link, store)
    if transport == "gloo":
        return dist.ProcessGroupGloo(own, rank, world, TIMEOUT)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = TIMEOUT
    return dist.ProcessGroupNCCL(own, rank, world, options)


def broadcast(group: Any, tensor: torch.Tensor) -> torch.Tensor:
    """From rank 0 to all."""
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    group.broadcast([tensor], options).wait()
    return tensor


class Receiver:
    """One worker's end of one link. `rank` counts from 1, for the learner is 0."""

    def __init__(self, stream: Stream, rank: int, device: torch.device) -> None:
        self.stream = stream
        self._rank = rank
        self._device = device
        self._store = store_at(stream.address)
        if rank == 1:
            announced = json.dumps({"link": stream.link, "world": stream.world, "engine": stream.engine})
            self._store.set(link_key(self._store.add(LINKS, 1)), announced)
        self._group = group_of(stream.transport, self._store, stream.link, rank, stream.world)
        self._asked = 0

    def serves(self, stream: Stream) -> bool:
        """Whether this link is the one that the stream means."""
        return (self.stream.address, self.stream.link) == (stream.address, stream.link)

    def receive(self, digest: str) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of a version. The iterator has to be read to its end."""
        self._asked += 1
        if self._rank == 1:
            self._store.set(ask_key(self.stream.link, self._asked), digest)
        header = self._header()
        if header["digest"] != digest or header.get("refused"):
            raise Refused(
                f"asked for weights {digest[:12]}, the learner said: {header.get('refused') or header['digest']}"
            )
        for bucket in header["buckets"]:
            # A buffer of its own for each bucket: vLLM's layerwise reload keeps views until a layer is complete.
            buffer = broadcast(self._group, torch.empty(bucket["bytes"], dtype=torch.uint8, device=self._device))
            for entry in bucket["tensors"]:
                yield entry["name"], _view(buffer, entry)

    def _header(self) -> dict[str, Any]:
        length = broadcast(self._group, torch.zeros(1, dtype=torch.int64, device=self._device))
        data = torch.empty(int(length.item()), dtype=torch.uint8, device=self._device)
        header: dict[str, Any] = json.loads(bytes(broadcast(self._group, data).cpu().tolist()))
        return header


def _view(buffer: torch.Tensor, entry: dict[str, Any]) -> torch.Tensor:
    dtype = getattr(torch, entry["dtype"])
    size = math.prod(entry["shape"]) * dtype.itemsize
    return buffer[entry["at"] : entry["at"] + size].view(dtype).view(entry["shape"])

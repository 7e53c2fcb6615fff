"""What the ranks of a process group do together. In a single process each of these is a no-op.

Promises: all ranks run the same number of rows, so that none waits for another for ever.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from openforge.learner.packing import HasTokens, Row, cost
from openforge.learner.routing import Routing

RowT = TypeVar("RowT", bound=HasTokens)


class HasRouting(HasTokens, Protocol):
    @property
    def routing(self) -> Routing | None: ...


PAIR_COST = 3e-4
"""What attending to one token costs, in units of a token's other work; about right from 100M to 10B."""


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def shard(policy: Any, device: torch.device) -> None:
    """FSDP2: each decoder layer and the rest are sharded over all ranks of the process group, if there is one."""
    if not dist.is_initialized():
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (world(),))
    for layer in policy.model.get_decoder().layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(policy, mesh=mesh)


def share(rows: Sequence[RowT], own_rank: int, world_size: int) -> list[tuple[RowT, float]]:
    """A rank's rows with weight 1, padded with weight 0 to the length of the longest share."""
    return shares(rows, world_size)[own_rank]


def shares(rows: Sequence[RowT], world_size: int) -> list[list[tuple[RowT, float]]]:
    """Of each rank its `share`."""
    parts = balanced(rows, world_size)
    longest = max(map(len, parts))
    return [[(row, 1.0) for row in own] + [(row, 0.0) for row in rows[:1]] * (longest - len(own)) for own in parts]


def balanced(rows: Sequence[RowT], world_size: int) -> list[list[RowT]]:
    """The rows dealt to ranks: as evenly as can be in number, since all run as many as the longest share has, dearest
    first and each to whoever has the least to compute so far."""
    parts: list[list[RowT]] = [[] for _ in range(world_size)]
    load = [0.0] * world_size
    most = math.ceil(len(rows) / world_size)
    for row in sorted(rows, key=lambda row: -cost(row, PAIR_COST)):
        lightest = min((place for place in range(world_size) if len(parts[place]) < most), key=load.__getitem__)
        parts[lightest].append(row)
        load[lightest] += cost(row, PAIR_COST)
    return parts


def with_routing(rows: Sequence[Row]) -> list[tuple[Row, float]]:
    """This rank's share of rows whose experts rank 0 alone knows."""
    own = share(rows, rank(), world())
    told = dealt(rows, range(world()))
    return [(msgspec.structs.replace(row, routing=one), part) for (row, part), one in zip(own, told, strict=True)]


def dealt(rows: Sequence[HasRouting], share_R: Sequence[int]) -> list[Routing | None]:
    """What the rows of this rank's share go through: rank 0, which alone knows, tells each rank of its own.

    `share_R` says which share is each rank's: those that compute one model together have the same."""
    if world() == 1:
        return deals(rows, share_R)[0]
    told: list[list[Routing | None]] = [[]]
    dist.scatter_object_list(told, deals(rows, share_R) if rank() == 0 else None)
    return told[0]


def deals(rows: Sequence[HasRouting], share_R: Sequence[int]) -> list[list[Routing | None]]:
    """For each rank what its rows go through; a row that only fills its share up goes through what it likes."""
    parts = [[row.routing if part else None for row, part in own] for own in shares(rows, max(share_R) + 1)]
    return [parts[each] for each in share_R]


def reduce_gradients(policy: Any, last: bool) -> None:
    """Gradients travel once a step, with the last row."""
    if world() > 1:
        policy.set_requires_gradient_sync(last)


def merge(sums: Tensor, maxima: Tensor) -> None:
    if world() > 1:
        dist.all_reduce(sums, dist.ReduceOp.SUM)
        dist.all_reduce(maxima, dist.ReduceOp.MAX)


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a sharded one: a collective."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

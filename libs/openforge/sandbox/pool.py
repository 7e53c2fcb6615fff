"""Sandboxes made before they are asked for.

Promises: what a pool hands out is unused, alive and labelled as asked; where none of that shape is ready, one is made
as if there were no pool; filling up waits behind everybody who waits for a sandbox.
"""

import asyncio
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal

import msgspec

from openforge.ending import cancel
from openforge.sandbox.admission import NORMAL, SPARE, Admission, Busy
from openforge.sandbox.contract import Box, SandboxDriver, SandboxLimits, SandboxLost, SandboxSpec

_SPARE_TTL_S = 30 * 86400.0  # the end of its maker ends it too
_PAUSE_S = 1.0  # after a sandbox could not be made


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What cannot be changed of a sandbox once it is made."""

    image: str
    limits: SandboxLimits
    network: str
    hosts: tuple[str, ...]
    proxy_port: int
    binds: tuple[tuple[str, str], ...]


class Pool:
    """A driver, with sandboxes ahead of demand. See `SandboxDriver`."""

    def __init__(self, driver: SandboxDriver, admission: Admission) -> None:
        self.isolation: Literal["full", "reduced"] = driver.isolation
        self.images = driver.images
        self._driver = driver
        self._admission = admission
        self._wanted: dict[Shape, tuple[SandboxSpec, int]] = {}
        self._ready: dict[Shape, deque[Box]] = {}
        self._short = asyncio.Event()
        self._filling: asyncio.Task[None] | None = None

    def keep(self, spec: SandboxSpec, size: int) -> None:
        """From now on so many of this kind are ready, or being made."""
        shape = self._shape_of(spec)
        self._wanted[shape] = (spec, size)
        self._ready.setdefault(shape, deque())
        self._short.set()
        if self._filling is None:
            self._filling = asyncio.create_task(self._keep_full())

    @property
    def spare(self) -> int:
        return sum(len(boxes) for boxes in self._ready.values())

    def take(self, spec: SandboxSpec) -> Box | None:
        """A ready one, now; None where there is none of that shape."""
        boxes = self._ready.get(self._shape_of(spec), deque())
        while boxes:
            box = boxes.popleft()
            self._short.set()
            with suppress(SandboxLost):  # it died while it waited
                self._driver.adopt(box, spec)
                return box
        return None

    async def create(self, spec: SandboxSpec, *, priority: int = NORMAL) -> Box:
        """As the driver's, from the pool where it can be; raises `Busy` too."""
        if (box := self.take(spec)) is not None:
            return box
        async with self._admission.turn(priority):
            return self.take(spec) or await self._driver.create(spec)

    def adopt(self, box: Box, spec: SandboxSpec) -> None:
        self._driver.adopt(box, spec)

    async def reconcile(self, labels: Mapping[str, str]) -> int:
        return await self._driver.reconcile(labels)

    async def drain(self) -> None:
        """End those that nobody asked for, and make no more."""
        if self._filling is not None:
            await cancel(self._filling)
            self._filling = None
        boxes = [box for ready in self._ready.values() for box in ready]
        self._ready.clear()
        self._wanted.clear()
        await asyncio.gather(*(box.stop() for box in boxes))

    async def close(self) -> None:
        await self.drain()
        await self._driver.close()

    def _shape_of(self, spec: SandboxSpec) -> Shape:
        return Shape(
            image=spec.image if self.images else "",
            limits=spec.limits,
            network=spec.network,
            hosts=spec.hosts,
            proxy_port=spec.proxy_port,
            binds=tuple(sorted(spec.binds.items())),
        )

    async def _keep_full(self) -> None:
        while True:
            await self._short.wait()
            self._short.clear()
            for shape, (spec, size) in list(self._wanted.items()):
                while len(self._ready[shape]) < size:
                    await self._add(shape, spec)

    async def _add(self, shape: Shape, spec: SandboxSpec) -> None:
        labels: dict[str, Any] = {**spec.labels, "pool": "spare"}
        spare = msgspec.structs.replace(spec, name="spare", labels=labels, ttl_s=_SPARE_TTL_S)
        try:
            async with self._admission.turn(SPARE):
                self._ready[shape].append(await self._driver.create(spare))
        except (SandboxLost, Busy):
            await asyncio.sleep(_PAUSE_S)

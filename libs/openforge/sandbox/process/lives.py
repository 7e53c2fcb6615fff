"""What drivers on this host share: boxes that talk to us by our init, and what must be ended with each of them.

Promises: whatever was begun for a box is in its life before it exists, and is ended with it, by whoever asks first: its
owner, its time, or a failed start; folders of drivers that died are forgotten.
"""

import abc
import asyncio
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Generic, TypeVar

from openforge.sandbox.contract import Box, SandboxLost, SandboxSpec
from openforge.sandbox.process.box import ProcessSandbox
from openforge.sandbox.process.control import Control
from openforge.sandbox.process.records import Owner, Record, Records
from openforge.sandbox.process.ways_out import WayOut


class Life:
    """What must be ended when a sandbox is, as far as it was begun."""

    def __init__(self, box_id: str) -> None:
        self.id = box_id
        self.control: Control | None = None
        self.ways_out: list[WayOut] = []
        self.expiry: asyncio.TimerHandle | None = None

    def close_doors(self) -> None:
        if self.expiry is not None:
            self.expiry.cancel()
        for way in self.ways_out:
            way.stop()


L = TypeVar("L", bound=Life)


class DriverHere(abc.ABC, Generic[L]):
    """`_base` is a folder of this driver alone, for what all its sandboxes share."""

    def __init__(self, state_dir: Path, owner: str) -> None:
        self._state_dir = state_dir
        self._owner = owner
        self._records = Records(state_dir / "boxes")
        me = self._records.me
        self._base = state_dir / f"base-{me.pid}-{me.started}-{secrets.token_hex(3)}"
        self._living: dict[ProcessSandbox, L] = {}

    @abc.abstractmethod
    def _env(self, life: L, spec: SandboxSpec) -> Mapping[str, str]:
        """What commands of the sandbox find in their environment."""

    @abc.abstractmethod
    def _record(self, life: L, spec: SandboxSpec) -> Record: ...

    @abc.abstractmethod
    async def _end(self, life: L) -> None:
        """Kill, wait, remove, forget, in that order: what is not gone stays recorded."""

    def adopt(self, box: Box, spec: SandboxSpec) -> None:
        life = self._living.get(box) if isinstance(box, ProcessSandbox) else None
        if life is None or life.control is None or not life.control.open:
            raise SandboxLost(f"{box.id}: it is gone")
        assert isinstance(box, ProcessSandbox)
        self._records.write(self._record(life, spec))
        box.use_env(self._env(life, spec))
        self._expire(life, box, spec.ttl_s)

    def _hold(self, life: L, box: ProcessSandbox, ttl_s: float) -> None:
        self._expire(life, box, ttl_s)
        self._living[box] = life

    def _expire(self, life: L, box: ProcessSandbox, ttl_s: float) -> None:
        if life.expiry is not None:
            life.expiry.cancel()
        life.expiry = asyncio.get_running_loop().call_later(ttl_s, lambda: self._bury(box))

    def _bury(self, box: ProcessSandbox) -> "asyncio.Future[None]":
        life = self._living.pop(box, None)
        if life is None:
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            done.set_result(None)
            return done
        return asyncio.ensure_future(self._end(life))

    async def _stop_all(self) -> None:
        await asyncio.gather(*(box.stop() for box in list(self._living)))

    async def _forget_base(self) -> None:
        await asyncio.to_thread(shutil.rmtree, self._base, ignore_errors=True)

    def _forget_dead_copies(self) -> None:
        for folder in self._state_dir.glob("base-*"):
            _, pid, started, _ = folder.name.split("-")
            if not Owner(pid=int(pid), started=started).lives():
                shutil.rmtree(folder, ignore_errors=True)

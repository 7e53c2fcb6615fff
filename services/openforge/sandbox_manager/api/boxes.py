"""The sandboxes of one replica: made, found, kept alive, ended.

Promises: an id belongs to one owner and one request for good; what is created is ended by its client, its lease,
its time or this replica's end, whichever is first; a client that comes when there is no room is told when to
come back.
"""

import asyncio
import hashlib
import os
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress

from openforge.sandbox.admission import Admission, Busy
from openforge.sandbox.contract import Box, Network, SandboxLimits, SandboxLost, SandboxSpec
from openforge.sandbox.egress import check_network
from openforge.sandbox.pool import Pool
from openforge.sandbox_manager.api.amounts import amount
from openforge.sandbox_manager.api.registry import Entry, Registry
from openforge.sandbox_manager.api.settings import ApiSettings
from openforge.sandbox_manager.api.shapes import (
    Amount,
    CreateReply,
    CreateRequest,
    Node,
    PodReply,
    ResourcesReply,
    SandboxReply,
    Status,
)
from openforge.service import log

NAMESPACE = "openforge"
DEFAULT_CPU, DEFAULT_MEMORY, DEFAULT_TIMEOUT_S = "4", "16Gi", 3600
_ROOM_BESIDE_FILES_MB = 128
_RETRY_AFTER_S = 5.0


class Taken(Exception):
    """The id belongs to another request or owner."""


class Served:
    """One sandbox as a client knows it, from the moment that it was asked for."""

    def __init__(self, sandbox_id: str, request: CreateRequest, spec: SandboxSpec, settings: ApiSettings) -> None:
        self.id = sandbox_id
        self.request = request
        self.spec = spec
        self.digest = digest_of(request)
        self.owner = request.owner or ""
        self.created_at = time.time()
        self.expires_at: float | None = None
        self.lease_s = request.lease_seconds
        self.lease_until: float | None = None
        self.box: Box | None = None
        self.failure = ""
        self.settled = asyncio.Event()
        self.making: asyncio.Task[None] | None = None
        self._heartbeat_s = settings.sandbox_api_heartbeat_s

    @property
    def status(self) -> Status:
        if self.box is not None and not self.box.alive:
            self.failure = "the sandbox is gone"
        if self.failure:
            return "failed"
        return "ready" if self.box is not None else "pending"

    def begin(self, box: Box) -> None:
        """Its time and its lease count from when it can be used."""
        self.box = box
        self.expires_at = time.time() + self.spec.ttl_s
        if self.lease_s:
            self.heartbeat()

    def heartbeat(self) -> None:
        """From the first one on they must go on coming."""
        self.lease_until = time.time() + (self.lease_s or self._heartbeat_s)

    def is_over(self, now: float) -> bool:
        return any(end is not None and now >= end for end in (self.expires_at, self.lease_until))

    def created(self) -> CreateReply:
        return CreateReply(
            sandbox_id=self.id,
            namespace=NAMESPACE,
            image=self.request.image,
            block_network=self.request.block_network,
            cpu=self.request.cpu or DEFAULT_CPU,
            memory=self.request.memory or DEFAULT_MEMORY,
            timeout=self.request.timeout or DEFAULT_TIMEOUT_S,
            status="pending",
            labels=self.request.labels,
            owner=self.owner,
        )

    def reply(self, replica: str) -> SandboxReply:
        status = self.status
        return SandboxReply(
            sandbox_id=self.id,
            namespace=NAMESPACE,
            image=self.request.image,
            pod_name=f"sandbox-{self.id}",
            block_network=self.request.block_network,
            cpu=self.request.cpu or DEFAULT_CPU,
            memory=self.request.memory or DEFAULT_MEMORY,
            created_at=self.created_at,
            ready=status == "ready",
            status=status,
            status_message=self.failure,
            labels=self.request.labels,
            owner=self.owner,
            network=self.spec.network,
            replica=replica,
            expires_at=self.expires_at,
        )


class Boxes:
    def __init__(
        self, settings: ApiSettings, pool: Pool, admission: Admission, registry: Registry, labels: Mapping[str, str]
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._admission = admission
        self._registry = registry
        self._labels = dict(labels)
        self._served: dict[str, Served] = {}
        self._ending: set[asyncio.Task[None]] = set()

    # -- create

    async def create(self, sandbox_id: str, request: CreateRequest) -> Served:
        """Ask for one, or find the one that the same request made; raises `Taken`, `Busy` and `ValueError`."""
        spec = self.spec_of(sandbox_id, request)
        if (known := self._served.get(sandbox_id)) is not None:
            return _same(known, request)
        self.check_room()
        served = Served(sandbox_id, request, spec, self._settings)
        self._served[sandbox_id] = served  # before the first await: a repeated request finds it
        try:
            await self._claim(served)
        except BaseException:
            self._served.pop(sandbox_id, None)
            raise
        if (box := self._pool.take(spec)) is not None:
            self._settle(served, box)
        else:
            served.making = asyncio.create_task(self._make(served))
        return served

    def new_id(self) -> str:
        return secrets.token_hex(4)

    @property
    def room(self) -> int:
        return self._settings.sandbox_api_boxes - len(self._served)

    def check_room(self) -> None:
        """Raises `Busy`."""
        if self.room <= 0:
            raise Busy(f"{len(self._served)} sandboxes live here and no more may", _RETRY_AFTER_S)
        self._admission.check()

    async def _claim(self, served: Served) -> None:
        entry = Entry(
            replica=self._registry.replica, owner=served.owner, digest=served.digest, labels=served.request.labels
        )
        if not await self._registry.claim(served.id, entry):
            raise Taken(f"sandbox_id = {served.id!r} is in use: choose another")

    async def _make(self, served: Served) -> None:
        timeout_s = float(served.request.timeout or DEFAULT_TIMEOUT_S)
        try:
            async with asyncio.timeout(timeout_s):
                box = await self._pool.create(served.spec, priority=served.request.priority)
        except TimeoutError:
            served.failure = f"not ready after {timeout_s:g} s"
        except (SandboxLost, Busy, ValueError) as error:
            served.failure = str(error)
        else:
            self._settle(served, box)
        finally:
            served.settled.set()

    def _settle(self, served: Served, box: Box) -> None:
        if self._served.get(served.id) is served:
            served.begin(box)
        else:  # deleted meanwhile
            self._in_background(box)
        served.settled.set()

    def spec_of(self, sandbox_id: str, request: CreateRequest) -> SandboxSpec:
        """Raises `ValueError` naming the field."""
        settings = self._settings
        disk_mb = min(_megabytes("disk", request.disk), settings.sandbox_api_disk_mb) or settings.sandbox_api_disk_mb
        asked_mb = _megabytes("memory", request.memory or DEFAULT_MEMORY)
        memory_mb = max(min(asked_mb, settings.sandbox_api_memory_mb), disk_mb + _ROOM_BESIDE_FILES_MB)
        cores = float(os.cpu_count() or 1)
        network, hosts = _network(request)
        check_network(network, hosts)
        return SandboxSpec(
            name=f"api-{sandbox_id}",
            image=request.image,
            limits=SandboxLimits(
                memory_mb=memory_mb,
                pids=settings.sandbox_api_pids,
                disk_mb=disk_mb,
                cpus=min(amount("cpu", request.cpu or DEFAULT_CPU), cores),
            ),
            network=network,
            hosts=hosts,
            env=request.env,
            labels={**self._labels, "sandbox": sandbox_id, "client": request.owner or ""},
            ttl_s=request.ttl_seconds or settings.sandbox_api_ttl_s,
        )

    # -- find

    def find(self, sandbox_id: str) -> Served | None:
        return self._served.get(sandbox_id)

    def all(self) -> list[Served]:
        return list(self._served.values())

    # -- end

    async def delete(self, sandbox_id: str) -> None:
        """Gone for callers at once, for the machine soon."""
        served = self._served.pop(sandbox_id, None)
        if served is None:
            return
        if served.making is not None and not served.making.done():
            served.making.cancel()
        if served.box is not None:
            self._in_background(served.box)
        served.settled.set()
        await self._registry.forget(sandbox_id)

    async def sweep(self) -> None:
        """End what is past its time or its lease, and what lost its box."""
        now = time.time()
        for served in list(self._served.values()):
            if served.is_over(now):
                log.info("sandbox ended", sandbox=served.id, why="its time or its lease is over")
                await self.delete(served.id)

    async def close(self) -> None:
        for sandbox_id in list(self._served):
            with suppress(Exception):  # the bus may be gone already, and the boxes must go all the same
                await self.delete(sandbox_id)
        if self._ending:
            await asyncio.wait(self._ending)

    def _in_background(self, box: Box) -> None:
        ending = asyncio.create_task(_stop(box))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    # -- resources

    def resources(self, isolation: str) -> ResourcesReply:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        machine = Amount(cpu=float(os.cpu_count() or 1), memory_bytes=memory)
        pods = [_pod(served) for served in self._served.values()]
        requested = Amount(
            cpu=sum(pod.cpu_request for pod in pods), memory_bytes=sum(pod.memory_request_bytes for pod in pods)
        )
        left = Amount(
            cpu=max(0.0, machine.cpu - requested.cpu),
            memory_bytes=max(0, machine.memory_bytes - requested.memory_bytes),
        )
        return ResourcesReply(
            status="ok",
            nodes=[Node(name=self._registry.replica or "local", capacity=machine, allocatable=machine)],
            total_capacity=machine,
            total_allocatable=machine,
            total_requested=requested,
            available=left,
            sandbox_pods=pods,
            isolation=isolation,
        )


async def _stop(box: Box) -> None:
    try:
        await box.stop()
    except SandboxLost as error:
        log.error("sandbox not gone", sandbox=box.id, why=str(error))


def _pod(served: Served) -> PodReply:
    phases = {"ready": "Running", "failed": "Failed"}
    return PodReply(
        name=f"sandbox-{served.id}",
        namespace=NAMESPACE,
        phase=phases.get(served.status, "Pending"),
        cpu_request=served.spec.limits.cpus,
        memory_request_bytes=served.spec.limits.memory_mb << 20,
    )


def _same(known: Served, request: CreateRequest) -> Served:
    if known.digest != digest_of(request):
        raise Taken(f"sandbox_id = {known.id!r} is in use: choose another")
    return known


def digest_of(request: CreateRequest) -> str:
    return hashlib.sha256(request.model_dump_json().encode("utf-8", "surrogatepass")).hexdigest()


def _megabytes(field: str, text: str | None) -> int:
    return max(1, int(amount(field, text) / (1 << 20))) if text else 0


def _network(request: CreateRequest) -> tuple[Network, tuple[str, ...]]:
    if request.network is not None:
        return request.network.mode, tuple(request.network.hosts)
    return ("proxy-only" if request.block_network else "open"), ()

"""Sandboxes as pods of a cluster.

Promises: one watch follows all pods of this owner, so that a pod that fails is known at once and by the cluster's own
cause; a create whose answer was lost makes one pod; a sandbox that was given up is deleted, and what an earlier life of
this owner left is found by label; nothing of this host is needed but the way to the API server.
"""

import asyncio
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal

import msgspec
from kubernetes.client.exceptions import ApiException
from kubernetes.config import ConfigException
from urllib3.exceptions import HTTPError

from openforge.ending import cancel
from openforge.sandbox.contract import Box, CannotIsolate, SandboxLost, SandboxSpec
from openforge.sandbox.egress import check_network
from openforge.sandbox.kubernetes.box import KubernetesSandbox
from openforge.sandbox.kubernetes.cluster import Cluster
from openforge.sandbox.kubernetes.pod import (
    ANNOTATION,
    LABEL,
    PodSettings,
    nothing_in_or_out,
    out_to_proxy,
    pod,
)
from openforge.sandbox.kubernetes.state import PodState, state_of

_FAILURES = (ApiException, HTTPError, OSError)


class KubernetesDriver:
    """`owner` must be the same after a restart and nobody else's in this namespace: by it, pods of an earlier life are
    found. `image` is what sandboxes that name none are made from; `start_s` is how long a pod may take to run.
    `start` raises `CannotIsolate`.
    """

    images = True
    shows_folders = False
    isolation: Literal["full", "reduced"] = "full"

    def __init__(
        self,
        settings: PodSettings,
        *,
        owner: str,
        namespace: str = "default",
        kubeconfig: str = "",
        image: str = "",
        start_s: float = 300.0,
    ) -> None:
        try:
            self._cluster = Cluster(namespace, kubeconfig)
        except (ConfigException, OSError) as error:
            raise CannotIsolate(
                f"no way to a cluster ({error}): set KUBECONFIG, or run in a pod with a service account"
            ) from error
        self._settings = settings
        self._owner = _label_value(owner)
        self._life = secrets.token_hex(6)
        self._image = image
        self._start_s = start_s
        self._living: dict[str, KubernetesSandbox] = {}
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._delays: dict[str, str] = {}
        self._expiries: dict[str, asyncio.TimerHandle] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> "KubernetesDriver":
        """Reach the cluster and make the two policies."""
        labels = {f"{LABEL}owner": self._owner}
        try:
            for network in ("none", "proxy-only"):
                body = {**labels, f"{LABEL}network": network}
                name = f"openforge-{self._owner.lower()}-{network}"
                closed = network == "none" or not self._settings.proxy
                policy = nothing_in_or_out(name, body) if closed else out_to_proxy(name, body, self._settings)
                await self._cluster.create_policy(policy)
        except _FAILURES as error:
            raise CannotIsolate(f"the cluster cannot be used: {_said(error)}") from error
        self._watching = asyncio.create_task(self._follow())
        return self

    async def create(self, spec: SandboxSpec) -> Box:
        image = spec.image or self._image
        _check(spec, image, self._settings.tools)
        name = f"sandbox-{_fit(spec.name)}-{secrets.token_hex(4)}"
        ready = self._waiting[name] = asyncio.get_running_loop().create_future()
        try:
            await self._cluster.create_pod(pod(name, image, spec, self._settings, self._labels(spec)))
            async with asyncio.timeout(self._start_s):
                await ready
        except BaseException as error:
            self._in_background(self._delete(name))
            if isinstance(error, TimeoutError):
                why = self._delays.get(name, "nothing was heard of it")
                raise SandboxLost(f"{name}: not running after {self._start_s:.0f} s: {why}") from error
            if isinstance(error, _FAILURES):
                raise SandboxLost(f"{name}: {_said(error)}") from error
            raise
        finally:
            self._waiting.pop(name, None)
            self._delays.pop(name, None)
        box = KubernetesSandbox(
            name, self._cluster.namespace, self._cluster.configuration, dict(spec.env), lambda _: self._bury(name)
        )
        self._living[name] = box
        self._expire(box, spec.ttl_s)
        return box

    def adopt(self, box: Box, spec: SandboxSpec) -> None:
        if not isinstance(box, KubernetesSandbox) or not box.alive or self._living.get(box.id) is not box:
            raise SandboxLost(f"{box.id}: it is gone")
        box.use_env(dict(spec.env))
        self._expire(box, spec.ttl_s)
        self._in_background(self._label_anew(box.id, spec))

    async def reconcile(self, labels: Mapping[str, str]) -> int:
        """Pods of earlier lives of this owner. Those of an owner that does not come back end by their deadline."""
        try:
            pods, _ = await self._cluster.list_pods(f"{LABEL}owner={self._owner},{LABEL}life!={self._life}")
        except _FAILURES as error:
            raise SandboxLost(f"the pods could not be listed, so none was ended: {_said(error)}") from error
        orphans = [found.metadata.name for found in pods if labels.items() <= _labels_of(found).items()]
        for name in orphans:
            await self._delete(name)
        return len(orphans)

    async def close(self) -> None:
        await asyncio.gather(*(box.stop() for box in list(self._living.values())))
        if self._watching is not None:
            await cancel(self._watching)
        await asyncio.gather(*self._background, return_exceptions=True)
        self._cluster.close()

    # -- follow

    async def _follow(self) -> None:
        """For ever; a server that is away is asked again."""
        while True:
            try:
                async for kind, told in self._cluster.watch(f"{LABEL}life={self._life}"):
                    self._hear(kind, told)
            except _FAILURES:
                await asyncio.sleep(1.0)

    def _hear(self, kind: str, told: Any) -> None:
        if kind == "LISTED":
            for found in told:
                self._know(found.metadata.name, state_of(found))
            for name in self._living.keys() - {found.metadata.name for found in told}:
                self._know(name, PodState(kind="lost", why="it was deleted"))
        elif kind == "DELETED":
            self._know(told.metadata.name, PodState(kind="lost", why="it was deleted"))
        elif kind in ("ADDED", "MODIFIED"):
            self._know(told.metadata.name, state_of(told))

    def _know(self, name: str, state: PodState) -> None:
        ready, box = self._waiting.get(name), self._living.get(name)
        if ready is not None and not ready.done():
            self._delays[name] = state.why
            if state.kind == "ready":
                ready.set_result(None)
            elif state.kind == "lost":
                ready.set_exception(SandboxLost(f"{name}: {state.why}"))
        if box is not None and state.kind == "lost":
            box.lose(state.why)

    # -- end

    def _expire(self, box: KubernetesSandbox, ttl_s: float) -> None:
        if (earlier := self._expiries.pop(box.id, None)) is not None:
            earlier.cancel()
        later = asyncio.get_running_loop().call_later
        self._expiries[box.id] = later(ttl_s, lambda: self._in_background(box.stop()))

    def _bury(self, name: str) -> "asyncio.Future[None]":
        self._living.pop(name, None)
        if (expiry := self._expiries.pop(name, None)) is not None:
            expiry.cancel()
        return self._in_background(self._delete(name))

    async def _delete(self, name: str) -> None:
        try:
            await self._cluster.delete_pod(name)
        except _FAILURES as error:
            raise SandboxLost(f"{name}: it could not be deleted: {_said(error)}") from error

    async def _label_anew(self, name: str, spec: SandboxSpec) -> None:
        with suppress(*_FAILURES):  # it is then found under the labels that it was made with
            await self._cluster.annotate_pod(name, {ANNOTATION: msgspec.json.encode(dict(spec.labels)).decode()})

    def _labels(self, spec: SandboxSpec) -> dict[str, str]:
        own = {"owner": self._owner, "life": self._life, "network": spec.network}
        return {f"{LABEL}{key}": value for key, value in own.items()}

    def _in_background(self, work: Any) -> "asyncio.Task[None]":
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task


def _labels_of(found: Any) -> dict[str, str]:
    told = (found.metadata.annotations or {}).get(ANNOTATION, "{}")
    return msgspec.json.decode(told, type=dict[str, str])


def _check(spec: SandboxSpec, image: str, tools: Mapping[str, str]) -> None:
    """Raises `ValueError` naming the field."""
    if not image:
        raise ValueError("image = '': pods are made from images, name one, or a default by OPENFORGE_SANDBOX_IMAGE")
    limits = spec.limits
    if limits.pids < 1 or limits.disk_mb < 1 or limits.cpus <= 0 or limits.memory_mb < 1:
        raise ValueError(f"limits = {limits}: memory_mb, pids, disk_mb and cpus must be above zero")
    check_network(spec.network, spec.hosts)
    if spec.network not in ("none", "proxy-only"):
        raise ValueError(
            f"network = {spec.network!r}: driver kubernetes has none and proxy-only; policies know no names"
        )
    if missing := sorted(spec.binds.keys() - tools.keys()):
        raise ValueError(
            f"binds = {', '.join(missing)}: a pod sees no folder of this host; put it into the image, or one of its "
            "own, and name it in OPENFORGE_SANDBOX_TOOLS"
        )


def _fit(name: str) -> str:
    """As a part of a pod's name."""
    return re.sub(r"[^a-z0-9-]", "-", name.lower())[:40].strip("-") or "box"


def _label_value(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "-", text)[:40].strip("_.-") or "openforge"


def _said(error: BaseException) -> str:
    if isinstance(error, ApiException):
        with suppress(msgspec.DecodeError, TypeError, AttributeError):
            return str(msgspec.json.decode(error.body).get("message") or error.reason)
        return f"{error.status} {error.reason}"
    return str(error) or type(error).__name__

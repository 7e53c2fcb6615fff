"""The calls to the cluster that the driver makes, by the official client, each in a thread of its own.

Promises: what the server refuses for now (429, 500, 502, 503, 504, a broken connection) is asked again, after the
time it names or a growing pause, for half a minute; what it refuses for good is `ApiException` at once; `watch`
yields every change of the pods with a label, over any number of expired or broken watches, and forgets nothing that
was deleted meanwhile.
"""

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any, TypeVar

from kubernetes import client, config, watch
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

T = TypeVar("T")
_RETRIED = (429, 500, 502, 503, 504)
_PATIENCE_S, _LONGEST_PAUSE_S = 30.0, 5.0
_CALL_S = 30.0
_WATCH_S = 240
_GONE = 410


class Cluster:
    """One namespace. `kubeconfig` is a file, the pod's own account where empty."""

    def __init__(self, namespace: str, kubeconfig: str = "") -> None:
        self.namespace = namespace
        self.configuration = client.Configuration()
        if kubeconfig:
            config.load_kube_config(kubeconfig, client_configuration=self.configuration)
        else:
            config.load_incluster_config(client_configuration=self.configuration)
        self.configuration.retries = False
        self._api = client.ApiClient(self.configuration)
        self._core = client.CoreV1Api(self._api)
        self._network = client.NetworkingV1Api(self._api)

    def close(self) -> None:
        self._api.close()

    async def create_pod(self, body: dict[str, Any]) -> None:
        """One that is there already is the one of an earlier try whose answer was lost: names are ours alone."""
        with _unless(409):
            await self._call(lambda: self._core.create_namespaced_pod(self.namespace, body, _request_timeout=_CALL_S))

    async def create_policy(self, body: dict[str, Any]) -> None:
        create = self._network.create_namespaced_network_policy
        with _unless(409):
            await self._call(lambda: create(self.namespace, body, _request_timeout=_CALL_S))

    async def delete_pod(self, name: str) -> None:
        delete = self._core.delete_namespaced_pod
        with _unless(404):
            await self._call(lambda: delete(name, self.namespace, grace_period_seconds=0, _request_timeout=_CALL_S))

    async def annotate_pod(self, name: str, annotations: dict[str, str]) -> None:
        patch = self._core.patch_namespaced_pod
        body = {"metadata": {"annotations": annotations}}
        await self._call(lambda: patch(name, self.namespace, body, _request_timeout=_CALL_S))

    async def list_pods(self, selector: str) -> tuple[list[Any], str]:
        """Pods, and the version of the list."""
        read = self._core.list_namespaced_pod
        found = await self._call(lambda: read(self.namespace, label_selector=selector, _request_timeout=_CALL_S))
        return list(found.items), str(found.metadata.resource_version)

    async def watch(self, selector: str) -> AsyncIterator[tuple[str, Any]]:
        """(kind of change, pod), for ever: `LISTED` with a list of all pods, then `ADDED`, `MODIFIED`, `DELETED`."""
        while True:
            pods, version = await self.list_pods(selector)
            yield "LISTED", pods
            async for kind, pod in self._watch_from(selector, version):
                yield kind, pod

    async def _watch_from(self, selector: str, version: str) -> AsyncIterator[tuple[str, Any]]:
        """Until the server says that the version is too old, or the connection breaks: then all must be listed anew."""
        loop = asyncio.get_running_loop()
        changes: asyncio.Queue[tuple[str, Any] | None] = asyncio.Queue()
        watching = watch.Watch()

        def tell(item: "tuple[str, Any] | None") -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(changes.put_nowait, item)

        def read() -> None:
            try:
                for event in watching.stream(
                    self._core.list_namespaced_pod,
                    self.namespace,
                    label_selector=selector,
                    resource_version=version,
                    timeout_seconds=_WATCH_S,
                    _request_timeout=(_CALL_S, _WATCH_S + _CALL_S),
                ):
                    tell((event["type"], event["object"]))
            except (ApiException, HTTPError, OSError, ValueError):
                time.sleep(0.2)  # and then all is listed anew
            finally:
                tell(None)

        threading.Thread(target=read, name="watch", daemon=True).start()
        try:
            while (change := await changes.get()) is not None:
                yield change
        finally:
            watching.stop()

    async def _call(self, call: Callable[[], T]) -> T:
        deadline, pause_s = time.monotonic() + _PATIENCE_S, 0.1
        while True:
            try:
                return await asyncio.to_thread(call)
            except ApiException as error:
                if error.status not in _RETRIED or time.monotonic() > deadline:
                    raise
                pause_s = _named_pause(error) or pause_s
            except (HTTPError, OSError):
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _named_pause(error: ApiException) -> float:
    named = (error.headers or {}).get("Retry-After", "")
    return min(float(named), _PATIENCE_S) if str(named).isdigit() else 0.0


class _unless:  # noqa: N801 (reads as a word of the sentence)
    """Takes the refusal with this status for success."""

    def __init__(self, status: int) -> None:
        self._status = status

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: object, trace: object) -> bool:
        return isinstance(error, ApiException) and error.status == self._status

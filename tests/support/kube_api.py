"""An API server with one node, for tests of the Kubernetes driver: HTTP and WebSockets for the official client.

It reproduces what was seen on a real server of version 1.36 (uid, versions, selectors, watches with bookmarks
and 410, Pod Security `restricted`, quantities, refusals as Status objects, exec channels) and runs pods for real:
each is a tree of processes made by bubblewrap, with the pod's own volumes, and an exec joins it. An image is a
name in `images`; every pod sees this host's programs. Limits and network policies are kept and not enforced.
"""

import asyncio
import contextlib
import itertools
import json
import os
import re
import secrets
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from aiohttp import WSMsgType, web

NAMESPACE = "boxes"
TOKEN = "test-token"
_QUANTITY = re.compile(r"^[0-9.]+(m|k|Ki|M|Mi|G|Gi|T|Ti)?$")
_KINDS = {"networkpolicies": "NetworkPolicy", "pods": "Pod"}


class Refusal(Exception):
    """Becomes a Status object."""

    def __init__(self, code: int, reason: str, message: str, retry_after: int = 0) -> None:
        super().__init__(message)
        self.code, self.reason, self.retry_after = code, reason, retry_after


class KubeApi:
    """`toolbox` is the folder that `openforge.sandbox.kubernetes.toolbox` wrote. `refuse` holds answers to give before
    any other, one for each request; `unschedulable` keeps pods from getting a node."""

    def __init__(self, toolbox: Path) -> None:
        self.images = {"box:1", "toolbox:1"}
        self.image_volumes: dict[str, Path] = {}
        self.refuse: list[Refusal] = []
        self.unschedulable = False
        self.requests: list[str] = []
        self.lose_answers = 0
        self.port = 0
        self._toolbox = toolbox
        self._folder = Path(tempfile.mkdtemp(prefix="kube-"))
        self._objects: dict[tuple[str, str], dict[str, Any]] = {}
        self._version = itertools.count(100)
        self._now = 100
        self._oldest = 0
        self._history: list[tuple[int, str, dict[str, Any]]] = []
        self._news = asyncio.Event()
        self._broken = asyncio.Event()
        self._nodes: dict[str, Running] = {}
        self._begun: list[Running] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._runner: web.AppRunner | None = None

    # -- start and stop

    async def start(self) -> None:
        app = web.Application(client_max_size=64 << 20, middlewares=[self._guard])
        base = "/api/v1/namespaces/{namespace}/pods"
        app.router.add_post(base, self._create)
        app.router.add_get(base, self._list)
        app.router.add_delete(base, self._delete_collection)
        app.router.add_get(base + "/{name}", self._get)
        app.router.add_patch(base + "/{name}", self._patch)
        app.router.add_delete(base + "/{name}", self._delete)
        app.router.add_get(base + "/{name}/exec", self._exec)
        app.router.add_post("/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies", self._create)
        self._runner = web.AppRunner(app, shutdown_timeout=1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        for running in self._nodes.values():
            running.kill()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._broken.set()
        self._news.set()
        assert self._runner is not None
        await self._runner.cleanup()
        await asyncio.gather(*(running.ended() for running in self._begun))
        shutil.rmtree(self._folder, ignore_errors=True)

    def kubeconfig(self, place: Path) -> Path:
        cluster = {"server": f"http://127.0.0.1:{self.port}"}
        context = {"cluster": "test", "user": "test", "namespace": NAMESPACE}
        told = {
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "test", "user": {"token": TOKEN}}],
            "contexts": [{"name": "test", "context": context}],
        }  # fmt: skip
        place.write_text(yaml.safe_dump(told))
        return place

    # -- what tests do to it

    @property
    def pods(self) -> dict[str, dict[str, Any]]:
        return {name: found for (kind, name), found in self._objects.items() if kind == "pods"}

    @property
    def policies(self) -> dict[str, dict[str, Any]]:
        return {name: found for (kind, name), found in self._objects.items() if kind == "networkpolicies"}

    def break_watches(self, *, expire: bool = True) -> None:
        """End every watch now; with `expire` what they would go on from is too old."""
        if expire:
            self._oldest = self._now + 1
            self._bump()
        self._broken.set()
        self._broken = asyncio.Event()
        self._news.set()

    def end_pod(self, name: str, *, reason: str = "", container_reason: str = "", code: int = 137) -> None:
        """As an eviction (`reason`) or the kernel's out-of-memory killer (`container_reason`) would."""
        self._nodes.pop(name).kill()
        pod = self._objects["pods", name]
        ended = {"exitCode": code, "reason": container_reason or "Error"}
        pod["status"] = {
            "phase": "Failed",
            **({"reason": reason, "message": "The node was low on resource: memory."} if reason else {}),
            "containerStatuses": [_container(pod, {"terminated": ended})],
        }
        self._changed("MODIFIED", pod)

    # -- requests

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.requests.append(f"{request.method} {request.path}")
        try:
            if request.headers.get("Authorization") != f"Bearer {TOKEN}":
                raise Refusal(401, "Unauthorized", "Unauthorized")
            if request.match_info.get("namespace", NAMESPACE) != NAMESPACE:
                raise Refusal(403, "Forbidden", f"User cannot use namespace {request.match_info['namespace']}")
            if self.refuse and "exec" not in request.path and "watch" not in request.query:
                raise self.refuse.pop(0)
            reply: web.StreamResponse = await handler(request)
        except Refusal as refusal:
            headers = {"Retry-After": str(refusal.retry_after)} if refusal.retry_after else {}
            body = _status(refusal.code, refusal.reason, str(refusal))
            return web.json_response(body, status=refusal.code, headers=headers)
        if self.lose_answers and request.method == "POST":
            self.lose_answers -= 1
            assert request.transport is not None
            request.transport.close()
        return reply

    async def _create(self, request: web.Request) -> web.Response:
        kind = request.path.rpartition("/")[2]
        body = await request.json()
        meta = body["metadata"]
        if "name" not in meta:
            meta["name"] = meta["generateName"] + secrets.token_hex(3)[:5]
        if (kind, meta["name"]) in self._objects:
            raise Refusal(409, "AlreadyExists", f'{kind} "{meta["name"]}" already exists')
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", meta["name"]) or len(meta["name"]) > 253:
            raise Refusal(422, "Invalid", f'{kind} "{meta["name"]}" is invalid: metadata.name')
        if kind == "pods":
            _admit(body)
        made = {"apiVersion": "v1", "kind": _KINDS[kind], **body}
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        meta |= {"namespace": NAMESPACE, "uid": secrets.token_hex(16), "creationTimestamp": created}
        if request.query.get("dryRun") == "All":
            return web.json_response(made, status=201)
        self._objects[kind, meta["name"]] = made
        if kind == "pods":
            made["status"] = {"phase": "Pending"}
            self._changed("ADDED", made)
            self._in_background(self._run(made))
        else:
            self._bump(made)
        return web.json_response(made, status=201)

    async def _get(self, request: web.Request) -> web.Response:
        return web.json_response(self._pod(request))

    async def _patch(self, request: web.Request) -> web.Response:
        pod = self._pod(request)
        patch = await request.json()
        pod["metadata"].setdefault("annotations", {}).update(patch["metadata"].get("annotations", {}))
        self._changed("MODIFIED", pod)
        return web.json_response(pod)

    async def _delete(self, request: web.Request) -> web.Response:
        pod = self._pod(request)
        await self._remove(pod)
        return web.json_response(pod)

    async def _delete_collection(self, request: web.Request) -> web.Response:
        for pod in self._selected(request):
            await self._remove(pod)
        return web.json_response(_status(200, "", ""))

    async def _list(self, request: web.Request) -> web.StreamResponse:
        if request.query.get("watch") in ("true", "True", "1"):
            return await self._watch(request)
        meta = {"resourceVersion": str(self._now)}
        return web.json_response(
            {"apiVersion": "v1", "kind": "PodList", "metadata": meta, "items": self._selected(request)}
        )

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        since, broken = int(request.query.get("resourceVersion") or self._now), self._broken
        reply = web.StreamResponse(headers={"Content-Type": "application/json"})
        await reply.prepare(request)

        async def tell(kind: str, told: dict[str, Any]) -> None:
            await reply.write(json.dumps({"type": kind, "object": told}).encode() + b"\n")

        if since < self._oldest:
            await tell("ERROR", _status(410, "Expired", f"too old resource version: {since} ({self._oldest})"))
            return reply
        mark = {"kind": "Pod", "apiVersion": "v1", "metadata": {"resourceVersion": str(self._now)}}
        deadline = time.monotonic() + float(request.query.get("timeoutSeconds") or 300)
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < deadline and not broken.is_set():
                for version, kind, told in [change for change in self._history if change[0] > since]:
                    since = version
                    if _matches(told, request.query.get("labelSelector", "")):
                        await tell(kind, told)
                if request.query.get("allowWatchBookmarks") == "true":
                    await tell("BOOKMARK", mark)
                self._news.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), 0.5)
        return reply

    async def _exec(self, request: web.Request) -> web.StreamResponse:
        pod = self._pod(request)
        running = self._nodes.get(pod["metadata"]["name"])
        if running is None:
            raise Refusal(500, "InternalError", "unable to upgrade connection: container not found")
        socket = web.WebSocketResponse(protocols=("v5.channel.k8s.io", "v4.channel.k8s.io"), max_msg_size=0)
        await socket.prepare(request)
        await running.exec(socket, request.query.getall("command"))
        await socket.close()
        return socket

    # -- objects

    def _pod(self, request: web.Request) -> dict[str, Any]:
        name = request.match_info["name"]
        if ("pods", name) not in self._objects:
            raise Refusal(404, "NotFound", f'pods "{name}" not found')
        return self._objects["pods", name]

    def _selected(self, request: web.Request) -> list[dict[str, Any]]:
        return [pod for pod in self.pods.values() if _matches(pod, request.query.get("labelSelector", ""))]

    def _bump(self, made: dict[str, Any] | None = None) -> None:
        self._now = next(self._version) + 1
        if made is not None:
            made["metadata"]["resourceVersion"] = str(self._now)

    def _changed(self, kind: str, pod: dict[str, Any]) -> None:
        self._bump(pod)
        self._history.append((self._now, kind, json.loads(json.dumps(pod))))
        self._news.set()

    async def _remove(self, pod: dict[str, Any]) -> None:
        name = pod["metadata"]["name"]
        if (running := self._nodes.pop(name, None)) is not None:
            running.kill()
        if self._objects.pop(("pods", name), None) is not None:
            self._changed("DELETED", pod)

    # -- the node

    async def _run(self, pod: dict[str, Any]) -> None:
        """Scheduled, pulled, its volumes made, its init container obeyed, its first process started."""
        name, spec = pod["metadata"]["name"], pod["spec"]
        if self.unschedulable:
            why = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}
            self._state(pod, {"phase": "Pending", "conditions": [why]})
            return
        await asyncio.sleep(0.02)
        if spec["containers"][0]["image"] not in self.images:
            waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}}
            self._state(pod, {"phase": "Pending", "containerStatuses": [_container(pod, waiting)]})
            return
        running = Running(self._folder / name, self._toolbox, self.image_volumes)
        self._begun.append(running)
        await running.start(spec)
        if ("pods", name) not in self._objects:
            running.kill()
            return
        self._nodes[name] = running
        self._state(pod, {"phase": "Running", "containerStatuses": [_container(pod, {"running": {}})]})

    def _state(self, pod: dict[str, Any], status: dict[str, Any]) -> None:
        if ("pods", pod["metadata"]["name"]) in self._objects:
            pod["status"] = status
            self._changed("MODIFIED", pod)

    def _in_background(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class Running:
    """The processes of one pod."""

    def __init__(self, folder: Path, toolbox: Path, image_volumes: dict[str, Path]) -> None:
        self._folder = folder
        self._toolbox = toolbox
        self._image_volumes = image_volumes
        self._processes: list[asyncio.subprocess.Process] = []
        self.pid = 0

    async def start(self, spec: dict[str, Any]) -> None:
        """The volumes lie in `folder`; the toolbox's one command is known: copy the init, make the folders."""
        box = spec["containers"][0]
        (self._folder / "v").mkdir(parents=True)
        for volume in spec["volumes"]:
            if "image" in volume:
                (self._folder / "v" / volume["name"]).symlink_to(self._image_volumes[volume["image"]["reference"]])
        for mount in box["volumeMounts"]:
            (self._folder / "v" / mount["name"] / mount.get("subPath", "")).mkdir(parents=True, exist_ok=True)
        runtime = next(mount["name"] for mount in box["volumeMounts"] if mount.get("readOnly"))
        await asyncio.to_thread(
            shutil.copytree, self._toolbox, self._folder / "v" / runtime, symlinks=True, dirs_exist_ok=True
        )
        etc = self._folder / "etc"
        etc.mkdir()
        (etc / "hostname").write_text(f"{spec['hostname']}\n")
        (etc / "passwd").write_text("root:x:0:0::/:/bin/sh\nagent:x:1000:1000::/workspace:/bin/sh\n")
        told_read, told_write = os.pipe()
        line = ["bwrap", *self._view(box, etc), "--info-fd", str(told_write), "--", *box["command"]]
        quiet = asyncio.subprocess.DEVNULL
        try:
            self._processes.append(await asyncio.create_subprocess_exec(*line, stdin=quiet, pass_fds=(told_write,)))
        finally:
            os.close(told_write)
        told = await asyncio.to_thread(_read_all, told_read)
        self.pid = int(json.loads(told)["child-pid"])
        while not await asyncio.to_thread(self._runs, box["command"][0]):
            await asyncio.sleep(0.01)

    def _runs(self, program: str) -> bool:
        """Its namespaces and users are as they should be once bubblewrap has become the first process."""
        return Path(f"/proc/{self.pid}/cmdline").read_bytes().startswith(program.encode() + b"\0")

    def _view(self, box: dict[str, Any], etc: Path) -> list[str]:
        links = [part for name in ("bin", "sbin", "lib", "lib64") for part in ("--symlink", f"usr/{name}", f"/{name}")]
        line = [
            "--unshare-all", "--unshare-user", "--as-pid-1", "--new-session", "--hostname", "sandbox", "--uid", "1000",
            "--gid", "1000", "--cap-drop", "ALL", "--ro-bind", "/usr", "/usr", *links, "--ro-bind", str(etc), "/etc",
            "--proc", "/proc", "--dev", "/dev", "--clearenv", "--setenv", "PATH", "/usr/bin:/bin",
        ]  # fmt: skip
        for mount in box["volumeMounts"]:
            how = "--ro-bind" if mount.get("readOnly") else "--bind"
            line += [how, str(self._folder / "v" / mount["name"] / mount.get("subPath", "")), mount["mountPath"]]
        return [*line, "--remount-ro", "/", "--chdir", "/"]

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)  # the first process: all others go with it

    async def ended(self) -> None:
        """When none of its processes is left."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def exec(self, socket: web.WebSocketResponse, command: list[str]) -> None:
        pipe = asyncio.subprocess.PIPE
        join = ["nsenter", "-t", str(self.pid), "-U", "-m", "-p", "-n", "-i", "-u", "-S", "1000", "-G", "1000"]
        process = await asyncio.create_subprocess_exec(
            "setpriv", "--no-new-privs", *join, "--", *command,
            stdin=pipe, stdout=pipe, stderr=pipe, env={"PATH": "/usr/bin:/bin"}, cwd="/",
        )  # fmt: skip
        self._processes.append(process)
        assert process.stdout is not None
        assert process.stderr is not None
        outs = [asyncio.ensure_future(_carry(socket, n, r)) for n, r in ((1, process.stdout), (2, process.stderr))]
        feeding = asyncio.ensure_future(_feed(socket, process))
        code = await process.wait()
        await asyncio.wait(outs, timeout=1.0)
        for task in (*outs, feeding):
            task.cancel()
        await asyncio.gather(*outs, feeding, return_exceptions=True)
        with contextlib.suppress(ConnectionError):
            await socket.send_bytes(b"\x03" + json.dumps(_exec_status(code)).encode())


async def _carry(socket: web.WebSocketResponse, channel: int, stream: asyncio.StreamReader) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await stream.read(1 << 15):
            await socket.send_bytes(bytes([channel]) + data)


async def _feed(socket: web.WebSocketResponse, process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError):
        async for message in socket:
            if message.type == WSMsgType.BINARY and message.data[:1] == b"\x00":
                process.stdin.write(message.data[1:])
                await process.stdin.drain()
    process.stdin.close()  # whoever asked is gone: the command runs on


def _exec_status(code: int) -> dict[str, Any]:
    if code == 0:
        return {"metadata": {}, "status": "Success"}
    code = 128 - code if code < 0 else code
    cause = {"reason": "ExitCode", "message": str(code)}
    message = f"command terminated with non-zero exit code: exit code {code}"
    return {
        "metadata": {}, "status": "Failure", "reason": "NonZeroExitCode", "message": message,
        "details": {"causes": [cause]},
    }  # fmt: skip


def _read_all(fd: int) -> bytes:
    with os.fdopen(fd, "rb") as stream:
        return stream.read()


def _status(code: int, reason: str, message: str) -> dict[str, Any]:
    how = "Success" if code < 300 else "Failure"
    return {
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": how, "message": message, "reason": reason,
        "code": code,
    }  # fmt: skip


def _container(pod: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    box = pod["spec"]["containers"][0]
    ready = "running" in state
    return {
        "name": box["name"], "image": box["image"], "imageID": "", "ready": ready, "restartCount": 0, "state": state,
    }  # fmt: skip


def _matches(pod: dict[str, Any], selector: str) -> bool:
    labels = pod["metadata"].get("labels", {})
    for term in filter(None, selector.split(",")):
        key, different, value = term.partition("!=")
        if not different:
            key, _, value = term.replace("==", "=").partition("=")
        if (labels.get(key) == value) == bool(different):
            return False
    return True


def _admit(pod: dict[str, Any]) -> None:
    """Quantities, and the level `restricted` of Pod Security."""
    spec = pod["spec"]
    whole = spec.get("securityContext") or {}
    for container in [*spec.get("initContainers", []), *spec["containers"]]:
        for amounts in (container.get("resources") or {}).values():
            for amount in amounts.values():
                if not _QUANTITY.match(str(amount)):
                    raise Refusal(400, "BadRequest", f"quantities must match the regular expression, not {amount!r}")
        own = container.get("securityContext") or {}
        wrong = [
            said
            for said, fine in (
                ("privileged", not own.get("privileged")),
                ("allowPrivilegeEscalation != false", own.get("allowPrivilegeEscalation") is False),
                ("unrestricted capabilities", (own.get("capabilities") or {}).get("drop") == ["ALL"]),
                ("runAsNonRoot != true", own.get("runAsNonRoot", whole.get("runAsNonRoot")) is True),
                ("seccompProfile", bool(own.get("seccompProfile") or whole.get("seccompProfile"))),
            )
            if not fine
        ]
        if wrong:
            raise Refusal(403, "Forbidden", f'violates PodSecurity "restricted:latest": {", ".join(wrong)}')

"""The gate before a Docker daemon: what passes, what does not, over real sockets with a pretended daemon behind."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from openforge.sandbox.contract import SandboxLimits, SandboxSpec
from openforge.sandbox.docker import container
from openforge.sandbox.docker.gate.app import Gate
from openforge.sandbox.docker.gate.rules import plain, why_not

LABELS = {"openforge.sandbox": "b", "openforge.home": "h"}


def body(folder: Path, *, podman: bool = False) -> dict[str, Any]:
    """What the driver really asks for."""
    (folder / "tests").mkdir(exist_ok=True)
    spec = SandboxSpec(name="s", limits=SandboxLimits(memory_mb=64, pids=16, disk_mb=8))
    return container.body(
        spec,
        "image",
        ["/init"],
        ["control"],
        binds={"/tests": str(folder / "tests"), **container.own_binds(str(folder), str(folder))},
        volumes=["/data"],
        labels=LABELS,
        runtime="",
        podman=podman,
    )


def changed(whole: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    copy: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(whole))
    *way, last = path.split(".")
    inner = copy
    for step in way:
        inner = inner[step]
    inner[last] = value
    return copy


@pytest.mark.parametrize("podman", [False, True])
def test_what_the_driver_asks_for_passes(tmp_path: Path, podman: bool) -> None:
    assert why_not(body(tmp_path, podman=podman), [tmp_path], podman=podman) == ""
    assert why_not(body(tmp_path), [tmp_path], podman=podman) == ""


def test_no_first_process_is_root_but_behind_podman(tmp_path: Path) -> None:
    asked = body(tmp_path, podman=True)
    assert "OPENFORGE_GATE_PODMAN" in why_not(asked, [tmp_path])
    assert "CapAdd" in why_not(changed(asked, "User", "1000:1000"), [tmp_path])
    assert "User = '0:0'" in why_not(changed(asked, "HostConfig.CapAdd", []), [tmp_path], podman=True)
    assert "CapAdd" in why_not(changed(asked, "HostConfig.CapAdd", ["SYS_ADMIN"]), [tmp_path], podman=True)


def test_a_runtime_passes_where_it_is_named(tmp_path: Path) -> None:
    asked = changed(body(tmp_path), "HostConfig.Runtime", "runsc")
    assert "name it in OPENFORGE_GATE_RUNTIMES" in why_not(asked, [tmp_path])
    assert why_not(asked, [tmp_path], ["runsc"]) == ""


@pytest.mark.parametrize("podman", [False, True])
def test_no_place_is_mounted_twice(tmp_path: Path, podman: bool) -> None:
    asked = body(tmp_path, podman=podman)
    host = asked["HostConfig"]
    assert not {mount["Target"] for mount in host["Mounts"]} & host["Tmpfs"].keys()
    assert not any("/tests" in part for part in asked["Entrypoint"])


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("HostConfig.Privileged", True, "HostConfig.Privileged is nothing"),
        ("HostConfig.Binds", ["/:/host"], "HostConfig.Binds is nothing"),
        ("HostConfig.PidMode", "host", "HostConfig.PidMode is nothing"),
        ("HostConfig.Devices", [], "HostConfig.Devices is nothing"),
        ("hostconfig", {"Privileged": True}, "hostconfig is nothing"),
        ("NetworkingConfig", {}, "NetworkingConfig is nothing"),
        ("HostConfig.NetworkMode", "host", "NetworkMode has to be 'none'"),
        ("HostConfig.ReadonlyRootfs", False, "ReadonlyRootfs has to be True"),
        ("HostConfig.CapDrop", [], "CapDrop has to be"),
        ("HostConfig.CapAdd", ["SYS_ADMIN"], "is more than the driver asks for"),
        ("HostConfig.SecurityOpt", ["seccomp=unconfined"], "SecurityOpt has to be"),
        ("HostConfig.IpcMode", "host", "IpcMode has to be"),
        ("HostConfig.Memory", 0, "Memory has to be a limit"),
        ("HostConfig.PidsLimit", -1, "PidsLimit has to be a limit"),
        ("HostConfig.Runtime", "other", "is none that may be used"),
        ("User", "0:0", "User = '0:0' has to be 1000:1000"),
        ("Labels", {}, "Labels have to name openforge.sandbox"),
        ("HostConfig", None, "HostConfig is missing"),
    ],
)
def test_whatever_else_is_asked_for_is_refused_by_name(tmp_path: Path, path: str, value: Any, said: str) -> None:
    assert said in why_not(changed(body(tmp_path), path, value), [tmp_path])


@pytest.mark.parametrize(
    "mount",
    [
        {"Type": "bind", "Source": "/etc", "Target": "/x", "ReadOnly": True},
        {"Type": "bind", "Source": "FOLDER/../../etc", "Target": "/x", "ReadOnly": True},
        {"Type": "bind", "Source": "FOLDER/link", "Target": "/x", "ReadOnly": True},
        {"Type": "bind", "Source": "relative", "Target": "/x", "ReadOnly": True},
        {"Type": "bind", "Source": "FOLDER/tests", "Target": "/x", "ReadOnly": False},
        {"Type": "bind", "Source": "FOLDER/tests", "Target": "/x", "ReadOnly": True, "BindOptions": {}},
        {"Type": "volume", "Source": "nats", "Target": "/x", "ReadOnly": True},
        "nonsense",
    ],
)
def test_no_folder_is_shown_but_those_that_may_be(tmp_path: Path, mount: Any) -> None:
    (tmp_path / "link").symlink_to("/etc")
    if isinstance(mount, dict):
        mount = {**mount, "Source": mount["Source"].replace("FOLDER", str(tmp_path))}
    assert why_not(changed(body(tmp_path), "HostConfig.Mounts", [mount]), [tmp_path])


@pytest.mark.parametrize(
    "path", ["/images/../containers/x/json", "/containers/%2e%2e/json", "//info", "/info/", "/a b"]
)
def test_a_path_that_could_be_read_in_two_ways_is_not_plain(path: str) -> None:
    assert not plain(path)


class Daemon:
    """Knows one container of ours and one of somebody else's, and writes down what reached it."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str, bytes]] = []
        self.host: dict[str, Any] = {}
        paths = ("/info", "/containers/json", "/containers/create", "/containers/{name}/start", "/images/create")
        self.app = Starlette(
            routes=[
                *(Route(path, self._hear, methods=["GET", "POST"]) for path in paths),
                Route("/containers/{name}/json", self._inspect),
                Route("/containers/{name}", self._hear, methods=["DELETE"]),
            ]
        )

    async def _hear(self, request: Request) -> Response:
        self.heard.append((request.method, request.url.path, await request.body()))
        return JSONResponse({"Id": "new"})

    async def _inspect(self, request: Request) -> Response:
        labels: dict[str, Mapping[str, str]] = {"mine": LABELS, "foreign": {"com.docker.compose.service": "nats"}}
        name = request.path_params["name"]
        if name not in labels:
            return JSONResponse({"message": "No such container"}, status_code=404)
        return JSONResponse({"Config": {"Labels": labels[name]}, "HostConfig": self.host})


@pytest.fixture
def daemon() -> Daemon:
    return Daemon()


@pytest.fixture
async def gate(daemon: Daemon, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the gate; the daemon is behind a socket of its own."""
    place = tmp_path / "docker.sock"
    server = uvicorn.Server(uvicorn.Config(daemon.app, uds=str(place), log_config=None, lifespan="off"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    passing = Gate(place, [tmp_path])
    transport = httpx.ASGITransport(passing.app())
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        yield client
    await passing.close()
    server.should_exit = True
    await serving


async def test_a_sandbox_is_made_started_seen_and_removed(
    gate: httpx.AsyncClient, daemon: Daemon, tmp_path: Path
) -> None:
    daemon.host = body(tmp_path)["HostConfig"]
    made = await gate.post("/containers/create", params={"name": "mine"}, json=body(tmp_path))
    assert made.json() == {"Id": "new"}
    assert (await gate.post("/containers/mine/start")).status_code == 200
    assert (await gate.get("/containers/mine/json")).status_code == 200
    assert (await gate.delete("/containers/mine", params={"force": "true"})).status_code == 200
    listed = {"filters": '{"label": ["openforge.home=h"]}', "all": "true"}
    assert (await gate.get("/containers/json", params=listed)).status_code == 200
    assert [path for _, path, _ in daemon.heard] == [
        "/containers/create",
        "/containers/mine/start",
        "/containers/mine",
        "/containers/json",
    ]
    assert msgspec.json.decode(daemon.heard[0][2]) == body(tmp_path)


@pytest.mark.parametrize("told", ["Mounts", "Binds"])
async def test_a_folder_that_became_a_link_since_is_seen_when_the_container_is_to_start(
    gate: httpx.AsyncClient, daemon: Daemon, tmp_path: Path, told: str
) -> None:
    folder = tmp_path / "shown"
    folder.mkdir()
    mount = {"Type": "bind", "Source": str(folder), "Target": "/x", "ReadOnly": True}
    daemon.host = {"Mounts": [mount]} if told == "Mounts" else {"Mounts": None, "Binds": [f"{folder}:/x:ro,rbind"]}
    assert (await gate.post("/containers/mine/start")).status_code == 200
    folder.rmdir()
    folder.symlink_to("/var/run")
    reply = await gate.post("/containers/mine/start")
    assert reply.status_code == 403
    assert f"the folder '{folder}' may not be shown" in reply.json()["message"]
    assert len(daemon.heard) == 1
    assert (await gate.delete("/containers/mine")).status_code == 200


async def test_a_container_that_the_daemon_does_not_know_is_not_started_unseen(
    gate: httpx.AsyncClient, daemon: Daemon
) -> None:
    reply = await gate.post("/containers/nobody/start")
    assert (reply.status_code, reply.json()["message"]) == (404, "No such container")
    assert daemon.heard == []


@pytest.mark.parametrize(
    ("method", "path", "params"),
    [
        ("POST", "/containers/foreign/start", {}),
        ("DELETE", "/containers/foreign", {"force": "true"}),
        ("GET", "/containers/foreign/json", {}),
        ("GET", "/containers/json", {"all": "true"}),
        ("GET", "/containers/json", {"filters": '{"name": ["nats"]}'}),
        ("POST", "/images/create", {"fromSrc": "-"}),
        ("POST", "/containers/create", {"name": "x"}),
    ],
)
async def test_what_is_refused_never_reaches_the_daemon(
    gate: httpx.AsyncClient, daemon: Daemon, method: str, path: str, params: dict[str, str]
) -> None:
    reply = await gate.request(method, path, params=params)
    assert reply.status_code == 403
    assert f"the gate refuses {method} {path}" in reply.json()["message"]
    assert daemon.heard == []


@pytest.mark.parametrize("path", ["/exec/x/start", "/v1.41/info", "/build", "/containers/mine/exec", "/volumes/create"])
async def test_calls_that_the_driver_never_makes_have_no_route(
    gate: httpx.AsyncClient, daemon: Daemon, path: str
) -> None:
    assert (await gate.post(path)).status_code in (404, 405)
    assert daemon.heard == []


async def test_a_daemon_that_is_gone_is_said_to_be(tmp_path: Path) -> None:
    passing = Gate(tmp_path / "nobody.sock", [])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(passing.app()), base_url="http://engine") as client:
        reply = await client.get("/info")
        removed = await client.delete("/containers/x")
    await passing.close()
    assert (reply.status_code, removed.status_code) == (502, 502)
    assert "does not answer" in reply.json()["message"]

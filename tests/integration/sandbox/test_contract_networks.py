"""What every driver promises of networks, tried on each driver of `CASES`."""

import asyncio

import pytest
from sandbox_drivers import CASES, Case
from sandbox_fixtures import on, sh

from openforge.sandbox.contract import Sandbox, SandboxDriver

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Web:
    """A server that answers every request with its own name."""

    def __init__(self) -> None:
        self.port = 0
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def stop(self) -> None:
        assert self._server is not None
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[0]
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nasked: " + request + b"\n")
        await writer.drain()
        writer.close()


ASK = """
exec 3<>/dev/tcp/127.0.0.1/3128
printf 'GET http://%s/page?x=1 HTTP/1.1\\r\\nHost: x\\r\\nConnection: keep-alive\\r\\n\\r\\n' "$1" >&3
cat <&3
"""


TUNNEL = """
exec 3<>/dev/tcp/127.0.0.1/3128
printf 'CONNECT %s HTTP/1.1\\r\\n\\r\\n' "$1" >&3
read -r line <&3; read -r empty <&3; echo "$line"
printf 'GET /tunnelled HTTP/1.1\\r\\n\\r\\n' >&3
cat <&3
"""


REACHES_THE_WORLD = on(*(case for case in CASES if {"allowlist", "open"} <= set(case.networks)))


async def asked(box: Sandbox, script: str, where: str) -> bytes:
    return (await box.exec(["/bin/bash", "-c", script, "-", where], timeout_s=20)).stdout


@REACHES_THE_WORLD
async def test_a_box_with_an_allowlist_reaches_what_is_on_it_and_nothing_else(
    driver: SandboxDriver, case: Case
) -> None:
    web, other = Web(), Web()
    await web.start()
    await other.start()
    box = await driver.create(
        case.spec("listed", network="allowlist", hosts=(f"127.0.0.1:{web.port}", f"localhost:{other.port}"))
    )
    assert b"asked: GET /page?x=1 HTTP/1.1" in await asked(box, ASK, f"127.0.0.1:{web.port}")
    tunnelled = await asked(box, TUNNEL, f"127.0.0.1:{web.port}")
    assert b"200" in tunnelled.splitlines()[0]
    assert b"asked: GET /tunnelled" in tunnelled
    assert b"403 Forbidden" in await asked(box, ASK, f"127.0.0.1:{other.port}")
    by_name = await asked(box, ASK, f"localhost:{other.port}")
    assert b"403 Forbidden" in by_name
    assert b"no public address" in by_name
    assert (await sh(box, "echo $HTTPS_PROXY $no_proxy")).stdout == b"http://127.0.0.1:3128 127.0.0.1,localhost\n"
    assert (await asked(box, f"echo > /dev/tcp/127.0.0.1/{web.port} && echo reached", "")) == b""
    await box.stop()
    web.stop()
    other.stop()


@REACHES_THE_WORLD
@pytest.mark.parametrize("where", ["127.0.0.1:22", "169.254.169.254", "10.0.0.1", "[::1]:80", "[::ffff:127.0.0.1]:80"])
async def test_an_open_box_reaches_no_address_of_the_host_or_of_a_private_network(
    driver: SandboxDriver, case: Case, where: str
) -> None:
    box = await driver.create(case.spec("open", network="open"))
    assert b"no public address" in await asked(box, ASK, where)
    await box.stop()


async def test_a_box_without_network_has_no_way_out_at_all(driver: SandboxDriver, case: Case) -> None:
    box = await driver.create(case.spec("none", network="none"))
    for port in (3128, 8080):
        assert await asked(box, f"echo > /dev/tcp/127.0.0.1/{port} && echo reached", "") == b""
    await box.stop()


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"network": "everything"}, "network = 'everything'"),
        ({"network": "open", "hosts": ("a.org",)}, "hosts"),
        ({"network": "allowlist", "hosts": ("http://a.org/x",)}, "http://a.org/x"),
    ],
)
async def test_a_network_that_makes_no_sense_is_refused_by_name(
    driver: SandboxDriver, case: Case, wrong: dict[str, object], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        await driver.create(case.spec("wrong", **wrong))

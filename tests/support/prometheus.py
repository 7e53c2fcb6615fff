"""Prometheus and its promtool, which `make prometheus` takes out of Debian's package; one server for a test."""

import asyncio
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from openforge.bus.server import free_port

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "deploy" / "compose"
ETC = "/etc/prometheus/"


def program(name: str) -> str:
    return shutil.which(name) or str(Path(sys.executable).with_name(name))


PROMTOOL, PROMETHEUS = program("promtool"), program("prometheus")


def laid_out(folder: Path) -> Path:
    """The configuration in `folder`, beside the files that compose shows it in its container."""
    shown = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]["prometheus"]
    for source, target, _ in (volume.split(":") for volume in shown["volumes"] if ETC in volume):
        text = (COMPOSE / source).read_text().replace(ETC, f"{folder}/")
        (folder / target.removeprefix(ETC)).write_text(text)
    (config,) = (argument.removeprefix("--config.file=") for argument in shown["command"] if "config.file" in argument)
    return folder / config.removeprefix(ETC)


class Server:
    """`asked` is one look at its HTTP API."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def asked(self, path: str, **parameters: str) -> Any:
        answer = (await self._http.get(f"/api/v1/{path}", params=parameters)).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    async def ready(self) -> bool:
        try:
            return (await self._http.get("/-/ready")).is_success
        except httpx.TransportError:
            return False


@asynccontextmanager
async def prometheus(folder: Path, targets: dict[str, str], every: str = "1s") -> AsyncIterator[Server]:
    """It runs with the configuration of compose, but that its jobs ask `targets`, and more often."""
    config = laid_out(folder)
    told = yaml.safe_load(config.read_text())
    told["global"] = {"scrape_interval": every, "evaluation_interval": every}
    told["scrape_configs"] = [
        job | {"static_configs": [{"targets": [targets[job["job_name"]]]}]}
        for job in told["scrape_configs"]
        if job["job_name"] in targets
    ]
    assert {job["job_name"] for job in told["scrape_configs"]} == targets.keys()
    config.write_text(yaml.safe_dump(told))
    address = f"127.0.0.1:{free_port()}"
    process = await asyncio.create_subprocess_exec(
        *(PROMETHEUS, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"),
        f"--web.listen-address={address}",
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=30) as http:
            server = Server(http)
            while not await server.ready():
                assert process.returncode is None, "prometheus ended"
                await asyncio.sleep(0.1)
            yield server
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()

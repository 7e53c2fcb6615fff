"""Other projects' proxies for `bench proxy`: each in a venv of its own, as it is started by its own documentation.

Promises: a peer that cannot be started or asked is told with the reason.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from openforge.bus.server import free_port
from openforge.cli.bench._peers import NotMeasured
from openforge.cli.bench._proxy_load import Target

_START_S = 300.0
"""Some import for a minute on a busy machine."""
_LITELLM_KEY = "sk-4c1b9e07d25f4a8e8f63a1d07b92e5c4"
"""It does not start with a weak one, or none."""


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """`command` gets a folder of its own, the port to listen on and the engine's URL. `tells_port`: it chooses the port
    itself and prints it. `note`: how it was set up, where there is a choice.
    """

    name: str
    version: str
    requirement: str
    command: Callable[[Path, int, str], list[str]]
    path: str = "/v1/chat/completions"
    key: str = "none"
    tells_port: bool = False
    note: str = ""

    @property
    def title(self) -> str:
        return f"{self.name} {self.version}"


def _rllm(folder: Path, port: int, engine_url: str) -> list[str]:
    at = ["--host", "127.0.0.1", "--port", str(port), "--log-level", "WARNING"]
    return ["-m", "rllm_model_gateway", *at, "--db-path", str(folder / "traces.db"), "--worker", f"{engine_url}/v1"]


def _litellm(folder: Path, port: int, engine_url: str) -> list[str]:
    config = folder / "litellm.yaml"
    config.write_text(
        "model_list:\n  - model_name: m\n    litellm_params:\n"
        f"      {{model: openai/m, api_base: '{engine_url}/v1', api_key: none}}\n"
        f"general_settings: {{master_key: {_LITELLM_KEY}}}\n"
    )
    start = "from litellm import run_server; run_server()"
    return ["-c", start, "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]


def _verifiers(folder: Path, port: int, engine_url: str) -> list[str]:
    return [str(Path(__file__).with_name("_peer_verifiers.py")), f"{engine_url}/v1"]


PEERS = (
    Peer(
        name="rllm-model-gateway",
        version="0.1.0",
        requirement="rllm-model-gateway==0.1.0",
        command=_rllm,
        path="/sessions/{episode}/v1/chat/completions",
        note="traces in SQLite, its default",
    ),
    Peer(
        name="litellm",
        version="1.108.0",
        requirement="litellm[proxy]==1.108.0",
        command=_litellm,
        key=_LITELLM_KEY,
        note="records nothing",
    ),
    Peer(
        name="verifiers",
        version="0.4.0",
        requirement="verifiers==0.4.0",
        command=_verifiers,
        key="{episode}",
        tells_port=True,
        note="interception server with its relaying client, traces in memory",
    ),
)


@asynccontextmanager
async def peer_process(peer: Peer, python: Path, folder: Path, engine_port: int) -> AsyncIterator[tuple[Target, int]]:
    """What to ask, and the process id. Raises `NotMeasured`."""
    own = folder / peer.name
    own.mkdir()
    port = free_port()
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"NO_KEY": "none"}
    log = own / "log"
    with log.open("wb") as said:
        process = await asyncio.create_subprocess_exec(
            str(python),
            *peer.command(own, port, f"http://127.0.0.1:{engine_port}"),
            env=env,
            cwd=own,
            stdout=asyncio.subprocess.PIPE if peer.tells_port else said,
            stderr=said,
        )
    try:
        port = await _listening(process, port)
        headers = {"Authorization": f"Bearer {peer.key}"}
        yield Target(port=port, path=peer.path, headers=headers), process.pid
    except (TimeoutError, EOFError) as error:
        last = (log.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        raise NotMeasured(f"it did not start: {last[:300]}") from error
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _listening(process: asyncio.subprocess.Process, port: int) -> int:
    """The port, when somebody listens there."""
    async with asyncio.timeout(_START_S):
        if process.stdout is not None:
            line = await process.stdout.readline()
            if not line:
                raise EOFError
            return int(line.split()[-1])
        while process.returncode is None:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.1)
            else:
                writer.close()
                return port
        raise EOFError

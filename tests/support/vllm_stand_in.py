"""Takes vLLM's command line and serves its wire with the embedded engine: what the driver can be tested against.

Broadcast weights it takes with the receiving end of the plugin. As vLLM, it dies if an update starts while it is not
paused, or if one fails. With `--stand-in-fail-once FILE` the first update after FILE appears hangs for ever.
"""

import argparse
import asyncio
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute
from openforge_vllm.broadcast import Receiver, Stream
from safetensors.torch import save_file

from openforge.engine.api import make_app
from openforge.engine.embedded import EmbeddedEngine, EngineOptions
from openforge.weights import MANIFEST, WEIGHTS


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lora-modules")
    parser.add_argument("--lora-target-modules", nargs="+")
    parser.add_argument("--enable-lora", action="store_true")
    parser.add_argument("--max-loras", type=int, choices=[1])
    parser.add_argument("--max-lora-rank", type=int, choices=[1, 8, 16, 32, 64, 128, 256, 320, 512])
    parser.add_argument("--worker-extension-cls", choices=["openforge_vllm.adapters.AdapterSwap"])
    for name in ("model", "served-model-name", "host", "dtype", "logprobs-mode", "generation-config"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("port", "max-model-len", "max-num-seqs"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--weight-transfer-config", choices=['{"backend": "openforge"}'], required=True)
    parser.add_argument("--structured-outputs-config", choices=['{"backend": "guidance"}'], required=True)
    parser.add_argument("--enable-scale-out", action="store_true", required=True)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--distributed-executor-backend", default="mp")
    parser.add_argument("--enable-return-routed-experts", action="store_true")
    parser.add_argument("--stand-in-fail-once", type=Path)
    return parser.parse_args()


async def _serve(arguments: argparse.Namespace) -> None:
    adapter = (arguments.lora_modules or "").partition("=")
    options = EngineOptions(
        model_name=adapter[0] or arguments.served_model_name,
        dtype=arguments.dtype,
        max_requests=arguments.max_num_seqs,
        context=arguments.max_model_len,
        routed_experts=arguments.enable_return_routed_experts,
    )
    engine = EmbeddedEngine(options)
    await engine.load(Path(adapter[2] or arguments.model))
    app = make_app(engine)

    _add_weight_transfer(app, engine)
    if arguments.enable_lora:
        _add_swap(app, engine)

    @app.middleware("http")
    async def hang_once(request: Request, answer) -> Response:  # type: ignore[no-untyped-def]
        if request.url.path in ("/update_weights", "/collective_rpc") and _asked_to_hang(arguments.stand_in_fail_once):
            await asyncio.sleep(3600)
        result: Response = await answer(request)
        return result

    config = uvicorn.Config(
        app, host=arguments.host, port=arguments.port, log_level="warning", timeout_graceful_shutdown=1
    )
    await uvicorn.Server(config).serve()
    await engine.stop()


def _add_weight_transfer(app: FastAPI, engine: EmbeddedEngine) -> None:
    """The calls in their only order; any other ends the process, as vLLM's next step would."""
    state = {"initialised": False, "started": False, "loaded": False}

    def need(*names: str) -> None:
        if not all(state[name] for name in names):
            os._exit(1)

    @app.post("/init_weight_transfer_engine")
    async def init(body: dict[str, Any]) -> dict[str, str]:
        assert body == {"init_info": {}}
        state["initialised"] = True
        return {"message": "initialised"}

    @app.post("/start_weight_update")
    async def start() -> dict[str, str]:
        need("initialised")
        if not engine.running.is_paused:
            os._exit(1)
        state["started"] = True
        return {"message": "started"}

    receivers: list[Receiver] = []

    @app.get("/get_world_size")
    async def world_size() -> dict[str, int]:
        return {"world_size": 1}

    @app.post("/update_weights")
    async def update(body: dict[str, Any]) -> dict[str, str]:
        need("started")
        folder, stream = Path(body["update_info"]["folder"]), body["update_info"]["stream"]
        if stream is None:
            await engine.load(folder)
        else:
            await _load_received(engine, folder, Stream(**stream), receivers)
        state["loaded"] = True
        return {"message": "updated"}

    @app.post("/finish_weight_update")
    async def finish(body: dict[str, str]) -> dict[str, str]:
        need("started", "loaded")
        state["started"] = state["loaded"] = False
        await engine.running.ask(lambda batch: batch.rename(body["weight_version"]))
        return {"message": "finished"}


def _add_swap(app: FastAPI, engine: EmbeddedEngine) -> None:
    """The call that the plugin adds to vLLM's workers, before the embedded engine's own of that path."""

    async def swap(request: Request) -> Response:
        body = await request.json()
        assert body["method"] == "swap_adapter"
        if not engine.running.is_paused:
            os._exit(1)
        name, folder = body["args"]
        assert name == engine.options.model_name
        await engine.load(Path(folder))
        return Response('{"results": [null]}')

    app.router.routes.insert(0, APIRoute("/collective_rpc", swap, methods=["POST"]))


async def _load_received(engine: EmbeddedEngine, folder: Path, stream: Stream, receivers: list[Receiver]) -> None:
    """What came over the wire, beside the folder's other files."""
    if not receivers or not receivers[-1].serves(stream):
        receivers.append(await asyncio.to_thread(Receiver, stream, 1, torch.device("cpu")))
    tensors = await asyncio.to_thread(lambda: dict(receivers[-1].receive(stream.digest)))
    with tempfile.TemporaryDirectory() as received:
        for file in folder.iterdir():
            if file.suffix == ".json" and file.name != MANIFEST:
                shutil.copyfile(file, Path(received, file.name))
        save_file(tensors, Path(received, WEIGHTS), metadata={"format": "pt"})
        await engine.load(Path(received))


def _asked_to_hang(file: Path | None) -> bool:
    if file is None or not file.exists():
        return False
    file.unlink()
    return True


if __name__ == "__main__":
    asyncio.run(_serve(_arguments()))

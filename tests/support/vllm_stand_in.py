"""Takes vLLM's command line and serves its wire with the embedded engine: what the driver can be tested against.

With `--stand-in-fail-once FILE` the first weight call after FILE appears hangs for ever.
"""

import argparse
import asyncio
from pathlib import Path

import uvicorn
from fastapi import Request, Response

from openforge.engine.api import make_app
from openforge.engine.embedded import EmbeddedEngine, EngineOptions


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("model", "served-model-name", "host", "dtype", "logprobs-mode", "generation-config"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("port", "max-model-len", "max-num-seqs"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--enable-scale-out", action="store_true", required=True)
    parser.add_argument("--stand-in-fail-once", type=Path)
    return parser.parse_args()


async def _serve(arguments: argparse.Namespace) -> None:
    options = EngineOptions(
        model_name=arguments.served_model_name,
        dtype=arguments.dtype,
        max_requests=arguments.max_num_seqs,
        context=arguments.max_model_len,
    )
    engine = EmbeddedEngine(options)
    await engine.load(Path(arguments.model))
    app = make_app(engine)

    @app.middleware("http")
    async def hang_once(request: Request, answer) -> Response:  # type: ignore[no-untyped-def]
        if request.url.path == "/collective_rpc" and _asked_to_hang(arguments.stand_in_fail_once):
            await asyncio.sleep(3600)
        result: Response = await answer(request)
        return result

    config = uvicorn.Config(
        app, host=arguments.host, port=arguments.port, log_level="warning", timeout_graceful_shutdown=1
    )
    await uvicorn.Server(config).serve()
    await engine.stop()


def _asked_to_hang(file: Path | None) -> bool:
    if file is None or not file.exists():
        return False
    file.unlink()
    return True


if __name__ == "__main__":
    asyncio.run(_serve(_arguments()))

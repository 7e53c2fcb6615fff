"""The embedded engine without a bus, for benchmarks and for trying a model by hand.

`python -m openforge.engine.standalone --model FOLDER --url http://127.0.0.1:PORT` prints a line of JSON when it serves.
"""

import argparse
import asyncio
import json
import os
from pathlib import Path

from openforge.service import die_with_parent, listen_for_signals, set_up_logs


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m openforge.engine.standalone", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--url", required=True, help="where to listen, http://HOST:PORT")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--max-requests", type=int, default=64)
    parser.add_argument("--routed-experts", action="store_true", help="answers say which experts tokens went through")
    parser.add_argument("--context", type=int, default=0, help="longest sequence in tokens; 0 is the model's own")
    return parser.parse_args()


async def _serve(arguments: argparse.Namespace) -> None:
    from openforge.engine.embedded import EngineOptions
    from openforge.engine.in_process import InProcessBackend

    stop = asyncio.Event()
    listen_for_signals(stop)
    options = EngineOptions(
        dtype=arguments.dtype,
        threads=arguments.threads,
        max_requests=arguments.max_requests,
        context=arguments.context,
        routed_experts=arguments.routed_experts,
    )
    backend = InProcessBackend(arguments.url, options)
    await backend.start()
    try:
        outcome = await backend.apply(arguments.model, "", 0)
        computes_in = str(backend.engine.serving.model.dtype).removeprefix("torch.")
        print(json.dumps({"url": arguments.url, "load_s": outcome.load_s, "computes_in": computes_in}), flush=True)
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait((stopping, backend.died), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
    finally:
        await backend.stop()


def main() -> None:
    arguments = _arguments()
    if os.environ.get("OPENFORGE_DIE_WITH_PARENT") == "1":
        die_with_parent()
    os.environ |= {"OMP_NUM_THREADS": str(arguments.threads), "OMP_WAIT_POLICY": "PASSIVE"}
    set_up_logs("engine")
    asyncio.run(_serve(arguments))


if __name__ == "__main__":
    main()

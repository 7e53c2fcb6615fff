"""What no proxy of this kind can do without, in `bench proxy`: the row `floor`.

A call is read and not looked at, the engine is asked what our proxy would ask it, its answer is read and not looked at,
a record of the usual size is stored in a stream, acknowledged, under a fence, and an answer that was made before goes
back. HTTP, the engine's wire and the bus are those of our proxy.
"""

import asyncio
import os
import random
import socket
import sys
from itertools import count

import msgspec
import uvicorn
import uvloop
from starlette.types import Receive, Scope, Send

from openforge.bus import Bus, BusSettings
from openforge.bus.envelope import FENCE
from openforge.cli.bench._proxy_text import Conversation
from openforge.proxy.asgi import json_answer
from openforge.proxy.posting import Posting

RECORD_BYTES = 3_000
_PATH = "/inference/v1/generate"
_PROMPT_TOKENS = 8_000
_ANSWER_TOKENS = 200
_SILENCE_S = 60.0


class Floor:
    def __init__(self, bus: Bus, engine_port: int) -> None:
        self._bus = bus
        self._engine = Posting("127.0.0.1", engine_port, _SILENCE_S)
        prompt = [300 + index % 2000 for index in range(_PROMPT_TOKENS)]
        self._asked = msgspec.json.encode({"model": "policy", "token_ids": prompt, "stream": True})
        text = " ".join(Conversation("floor").messages[0]["content"].split()[:_ANSWER_TOKENS])
        self._answer = json_answer(msgspec.json.encode({"choices": [{"message": {"content": text}}]}))
        self._record = random.Random(0).randbytes(RECORD_BYTES)
        self._turns = count()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        async with self._engine.post(_PATH, self._asked) as answer:
            await answer.read()
        subject = f"of.floor.turn.recorded.{os.getpid()}.0.{next(self._turns)}"
        await self._bus.link.publish(subject, self._record, {FENCE: "0"})
        await self._answer(receive, send)


async def serve(port: int, nats_url: str, engine_port: int) -> None:
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listening.bind(("127.0.0.1", port))
    listening.listen()
    async with Bus.connect(BusSettings(url=nats_url), name="floor") as bus:
        app = Floor(bus, engine_port)
        config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none", proxy_headers=False)
        print("ready", flush=True)
        await uvicorn.Server(config).serve([listening])


if __name__ == "__main__":
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    asyncio.run(serve(int(sys.argv[1]), sys.argv[2], int(sys.argv[3])))

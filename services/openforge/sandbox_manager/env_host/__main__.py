"""`python -m openforge.sandbox_manager.env_host ENVIRONMENT`, started by the manager inside a sandbox.

Runs many episodes of one environment at once, executes nothing that a model wrote, and ends when the
manager does.
"""

import asyncio
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from openforge.env.contract import EnvironmentModule, PipelineEnv
from openforge.env.react import ReactLoop
from openforge.env.registry import load_environment
from openforge.sandbox.contract import SandboxLost
from openforge.sandbox.remote import RemoteSandbox, Reply, Request
from openforge.sandbox_manager.env_host.line import open_line, take_own_terminal
from openforge.sandbox_manager.env_host.wire import (
    Answer,
    Begin,
    Call,
    Cancel,
    Hello,
    Raised,
    Returned,
    ToManager,
    next_to_host,
    send,
)

SOCKET, SECRET, THREADS = "OPENFORGE_HOST_SOCKET", "OPENFORGE_HOST_SECRET", "OPENFORGE_HOST_THREADS"


class Host:
    def __init__(self, module: EnvironmentModule, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._module = module
        self._reader = reader
        self._writer = writer
        self._episodes: dict[int, asyncio.Task[None]] = {}
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._last_call = 0

    async def serve(self, secret: str) -> None:
        await self._say(Hello(secret=secret))
        with suppress(asyncio.IncompleteReadError, OSError):
            while True:
                self._hear(await next_to_host(self._reader))

    def _hear(self, message: Begin | Cancel | Answer) -> None:
        match message:
            case Begin():
                self._episodes[message.episode] = asyncio.create_task(self._run(message))
            case Cancel() if message.episode in self._episodes:
                self._episodes[message.episode].cancel()
            case Answer():
                waiting = self._calls.pop(message.call, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(message.reply)

    async def _run(self, begin: Begin) -> None:
        async def ask(request: Request) -> Reply:
            return await self._call(begin.token, request)

        sandbox = RemoteSandbox(begin.sandbox, begin.isolation, ask)
        ended: ToManager
        try:
            result = await self._pipeline(begin, sandbox).run(instruction=begin.instruction, llm_args=begin.llm_args)
            ended = Returned(episode=begin.episode, result=result)
        except Exception as error:  # the boundary: whatever an environment raises is told to who started it
            text = f"{type(error).__name__}: {error}"
            ended = Raised(episode=begin.episode, text=text, sandbox_lost=isinstance(error, SandboxLost))
        finally:
            del self._episodes[begin.episode]
        await self._say(ended)

    def _pipeline(self, begin: Begin, sandbox: RemoteSandbox) -> PipelineEnv:
        """The environment's own, or our loop around a direct one. `turns` among the options bounds that loop."""
        if self._module.HARNESSES.get(begin.harness) != "direct":
            return self._module.create_env(sandbox, harness=begin.harness, **begin.options)
        options = dict(begin.options)
        turns = int(options.pop("turns", 0))
        return ReactLoop(self._module.create_direct(sandbox, harness=begin.harness, **options), turns=turns)

    async def _call(self, token: str, request: Request) -> Reply:
        self._last_call += 1
        number = self._last_call
        waiting: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._calls[number] = waiting
        try:
            await self._say(Call(call=number, token=token, request=request))
            return await waiting
        finally:
            self._calls.pop(number, None)

    async def _say(self, message: ToManager) -> None:
        with suppress(ConnectionError):
            await send(self._writer, message)


async def main() -> None:
    """With `OPENFORGE_HOST_SOCKET` the manager listens there, without it is at the other end of our terminal."""
    line = None if SOCKET in os.environ else take_own_terminal()
    secret = os.environ.pop(SECRET)
    threads = ThreadPoolExecutor(int(os.environ.get(THREADS, "64")), thread_name_prefix="episode")
    asyncio.get_running_loop().set_default_executor(threads)
    module = load_environment(sys.argv[1])
    await asyncio.to_thread(getattr(module, "warm_up", lambda: None))
    reader, writer = await (asyncio.open_unix_connection(os.environ[SOCKET]) if line is None else open_line(line))
    await Host(module, reader, writer).serve(secret)
    sys.stderr.flush()
    os._exit(0)  # threads of harnesses may still wait for a model that nobody needs any more


if __name__ == "__main__":
    asyncio.run(main())

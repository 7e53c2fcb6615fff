"""mini-swe-agent as a pipeline: its own classes in this process, every command in the episode's sandbox.

Promises: nothing that the model wrote runs outside the sandbox; episodes share no state, and no key
reaches the environment variables; an episode that is called off starts no further command.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec

from openforge.env.contract import EnvCallResult, LlmArgs
from openforge.sandbox.contract import ExecResult, Sandbox

T = TypeVar("T")
AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]
ConfigName = Literal["one_reply", "one_reply_submit", "multi_turn"]
CONFIGS = Path(__file__).parent / "harness"
OUTPUT_CAP_BYTES = 1 << 16


class Cancelled(Exception):
    """The episode was called off while its thread was still at work."""


class BlockingSandbox:
    """A sandbox for code that cannot await: the thread waits while the event loop does the work."""

    def __init__(self, sandbox: Sandbox, loop: asyncio.AbstractEventLoop) -> None:
        self._sandbox = sandbox
        self._loop = loop
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        self._cancelled.set()

    def bash(self, command: str, *, timeout_s: float, env: dict[str, str]) -> ExecResult:
        """Run a line with bash, errors in the order in which they appeared among the output."""
        if self._cancelled.is_set():
            raise Cancelled
        argv = ("/bin/sh", "-c", 'exec 2>&1; exec bash -c "$0"', command)
        return self._wait(self._sandbox.exec(argv, timeout_s=timeout_s, env=env, output_cap=OUTPUT_CAP_BYTES))

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except CancelledError as error:
            raise Cancelled from error


class MiniPipeline:
    """One episode of mini-swe-agent. `config` names a file in `harness/`; the rest overrides its limits."""

    def __init__(
        self, sandbox: Sandbox, *, config: ConfigName = "one_reply", step_limit: AtLeastOne | None = None
    ) -> None:
        self._sandbox = sandbox
        self._config = config_file(config)
        self._step_limit = step_limit

    async def run(self, *, instruction: str, llm_args: LlmArgs, **_: Any) -> EnvCallResult:
        sandbox = BlockingSandbox(self._sandbox, asyncio.get_running_loop())

        def episode() -> EnvCallResult:
            # mini-swe-agent takes seconds to import: once per process, and not on the event loop
            from openforge_envs.shell.mini_episode import run_episode

            return run_episode(sandbox, self._config, instruction, llm_args, step_limit=self._step_limit)

        try:
            return await in_thread(episode)
        finally:
            sandbox.cancel()


def config_file(name: str) -> Path:
    if name not in (known := get_args(ConfigName)):
        raise ValueError(
            f"options.config = {name!r} is no configuration of mini-swe-agent here: use one of {', '.join(known)}"
        )
    return CONFIGS / f"{name}.yaml"


async def in_thread(work: Callable[[], T]) -> T:
    """Await `work` in a daemon thread of its own: a pool would make others wait for a stuck one, also at exit."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(setter: Callable[[Any], None], value: object) -> None:
        if not done.done():
            setter(value)

    def body() -> None:
        try:
            result = work()
        except BaseException as error:
            _call(loop, settle, done.set_exception, error)
        else:
            _call(loop, settle, done.set_result, result)

    threading.Thread(target=body, daemon=True, name="episode").start()
    return await done


def _call(loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *args: object) -> None:
    """Call back on the loop, if there still is one: an episode may outlive it by its last model call."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback, *args)

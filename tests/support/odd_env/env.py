"""An environment whose harnesses misbehave, each in one way. For tests of the sandbox manager.

What never ends sleeps for as many seconds as its task has for a seed, so that its processes can be told from others'.
"""

import asyncio
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec.structs import replace

from openforge.env.contract import (
    CommandAgent,
    DirectEnv,
    EnvCallResult,
    HarnessKind,
    LlmArgs,
    PipelineEnv,
    Step,
    TaskFile,
    TaskInstance,
    TaskTemplate,
)
from openforge.sandbox.contract import Sandbox
from openforge.sandbox.services import Health, Service

ASK = (
    "exec 3<>/dev/tcp/127.0.0.1/8080;"
    ' printf "POST %s HTTP/1.1\\r\\nAuthorization: Bearer %s\\r\\n\\r\\n" "$URL" "$KEY" >&3; cat <&3 >/dev/null'
)
COMMANDS = {
    "good": f"{ASK}; cat start.txt > done.txt",
    "mute": "echo I never asked anything",
    "absent": "/no/such/harness",
    "crash": f"{ASK}; echo dying with $KEY >&2; exit 3",
    "talker": f"{ASK}; {ASK}; {ASK}; exit 1",
    "endless": f"{ASK}; read long <start.txt; setsid sleep $long & sleep $long",
    "hog": f"{ASK}; x=$(head -c 400000000 /dev/zero | tr '\\0' x); echo $x",
    "writer": f"{ASK}; (setsid sh -c 'while :; do date +%N > clock; done' >/dev/null 2>&1 &); sleep 0.2",
}
PIPELINES = ("steps", "sync", "raises", "hangs", "dies", "censored", "claims", "keeps", "reuses")
KEPT: list[Sandbox] = []
HARNESSES: dict[str, HarnessKind] = {
    **dict.fromkeys(COMMANDS, "command"),
    **dict.fromkeys(PIPELINES, "pipeline"),
    "stepped": "direct",
}


class Start:
    id = "start"

    def draw(self, seed: int, split: Literal["train", "heldout"]) -> TaskInstance:
        return TaskInstance(
            task=self.id,
            seed=seed,
            split=split,
            instruction="copy start.txt to done.txt",
            workspace={"start.txt": TaskFile(content=b"%d\n" % seed)},
            tests={},
            reference="cp start.txt done.txt",
            verify=("true",),
        )


class Served(Start):
    """As `Start`, but a service must have written the file before the agent reads it."""

    id = "served"

    def draw(self, seed: int, split: Literal["train", "heldout"]) -> TaskInstance:
        service = Service(
            name="writer",
            command=("/bin/sh", "/tmp/services/write.sh", str(seed)),
            health=Health(command=("test", "-s", "/workspace/start.txt"), timeout_s=10.0),
        )
        write = TaskFile(content=b"sleep 0.5; echo $1 > start.txt; exec sleep $1\n")
        drawn = super().draw(seed, split)
        return replace(drawn, workspace={}, services=(service,), service_files={"write.sh": write})


class Sick(Served):
    """Its service ends at once."""

    id = "sick"

    def draw(self, seed: int, split: Literal["train", "heldout"]) -> TaskInstance:
        drawn = super().draw(seed, split)
        return replace(drawn, service_files={"write.sh": TaskFile(content=b"echo out of ink >&2; exit 9\n")})


def tasks() -> Sequence[TaskTemplate]:
    return [Start(), Served(), Sick()]


def create_command(*, harness: str, instruction: str, llm_args: LlmArgs, **options: Any) -> CommandAgent:
    env = {"URL": llm_args.base_url.removeprefix("http://127.0.0.1:8080"), "KEY": llm_args.api_key}
    if harness == "absent":
        return CommandAgent(argv=(COMMANDS[harness],), env=env)
    return CommandAgent(
        argv=("/bin/bash", "/tmp/harness.sh"), env=env, files={"/tmp/harness.sh": COMMANDS[harness].encode()}
    )


def create_env(sandbox: Sandbox, *, harness: str, **options: Any) -> PipelineEnv:
    return Odd(sandbox, harness)


def create_direct(sandbox: Sandbox, *, harness: str, **options: Any) -> DirectEnv:
    return Stepped(sandbox)


class Stepped:
    """Runs each reply as it is, twice."""

    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._steps = 0

    async def reset(self, instruction: str) -> Sequence[Mapping[str, Any]]:
        return [{"role": "user", "content": instruction}]

    async def step(self, reply: Mapping[str, Any]) -> Step:
        self._steps += 1
        await self._sandbox.exec(str(reply["content"]), timeout_s=5)
        return Step(observations=("again",), done=self._steps == 2, metrics={"steps": float(self._steps)})


class Odd:
    def __init__(self, sandbox: Sandbox, harness: str) -> None:
        self._sandbox = sandbox
        self._harness = harness

    async def run(self, *, instruction: str, llm_args: LlmArgs, **_: Any) -> EnvCallResult:
        await ask(llm_args)
        match self._harness:
            case "steps":
                await self._sandbox.exec("cat start.txt > done.txt", timeout_s=5)
            case "sync":
                await asyncio.to_thread(self._work_in_a_thread)
            case "raises":
                raise RuntimeError(f"boom with {llm_args.api_key}")
            case "hangs":
                await asyncio.to_thread(self._hang_in_a_thread)
            case "dies":
                os._exit(7)
            case "keeps":
                KEPT.append(self._sandbox)
            case "reuses":
                await KEPT[0].exec("cat start.txt > done.txt", timeout_s=5)
            case "censored":
                return EnvCallResult(status="censored", cause="model call: it never answered")
            case "claims":
                return EnvCallResult(status="gave_up", reward=0.5)
        return EnvCallResult(status="finished", metrics={"threads": float(threading.active_count())})

    def _work_in_a_thread(self) -> None:
        sync: Any = self._sandbox
        sync.exec_sync("cat start.txt > done.txt", timeout_s=5)

    def _hang_in_a_thread(self) -> None:
        sync: Any = self._sandbox
        sync.exec_sync("sleep $(cat start.txt)", timeout_s=600)


async def ask(llm_args: LlmArgs) -> None:
    host, _, path = llm_args.base_url.removeprefix("http://").partition("/")
    reader, writer = await asyncio.open_connection(*host.split(":"))
    writer.write(f"POST /{path} HTTP/1.1\r\nAuthorization: Bearer {llm_args.api_key}\r\n\r\n".encode())
    await reader.read()
    writer.close()

"""The environment `example`: its agent runs in an env host and acts through the sandbox. Copied by `env new`."""

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import httpx

from openforge.env.contract import EnvCallResult, HarnessKind, LlmArgs, PipelineEnv, TaskTemplate
from openforge.env.layout import load_tasks
from openforge.sandbox.contract import Sandbox, SandboxLost

HERE = Path(__file__).parent
SYSTEM = "You work in a Linux shell. Answer with one ```sh block that holds the next command; when done, with none."
BLOCK = re.compile(r"```(?:sh|bash)?[ \t]*\n(.*?)(?:\n?```|\Z)", re.DOTALL)

HARNESSES: dict[str, HarnessKind] = {"agent": "pipeline"}


@cache
def tasks() -> Sequence[TaskTemplate]:
    """One folder each in `tasks/`."""
    return load_tasks(HERE / "tasks")


def create_env(sandbox: Sandbox, *, harness: str, turns: int = 4) -> PipelineEnv:
    return Agent(sandbox, turns=turns)


class Agent:
    """Owns the whole episode. Replace `run` with any agent library that speaks to a model server."""

    def __init__(self, sandbox: Sandbox, turns: int) -> None:
        self._sandbox = sandbox
        self._turns = turns

    async def run(self, *, instruction: str, llm_args: LlmArgs, **_: Any) -> EnvCallResult:
        commands = 0
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": instruction}]
        try:
            for _turn in range(self._turns):
                reply = await _ask(messages, llm_args)
                command = BLOCK.search(reply)
                if command is None:
                    return EnvCallResult(status="finished", metrics={"commands": float(commands)})
                done = await self._sandbox.exec(command[1], timeout_s=30)
                commands += 1
                shown = (done.stdout + done.stderr).decode(errors="replace")[-2000:]
                said = f"Exit code {done.exit_code}\n{shown}"
                messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": said}]
        except httpx.HTTPError as error:
            return EnvCallResult(status="censored", cause=f"model call: {error}")
        except SandboxLost as error:
            return EnvCallResult(status="censored", cause=f"sandbox: {error}")
        return EnvCallResult(status="out_of_turns", metrics={"commands": float(commands)})


async def _ask(messages: list[dict[str, str]], llm_args: LlmArgs) -> str:
    async with httpx.AsyncClient(timeout=600) as client:
        response = await client.post(
            f"{llm_args.base_url}/chat/completions",
            json={"model": llm_args.model, "messages": messages},
            headers={"Authorization": f"Bearer {llm_args.api_key}"},
        )
    response.raise_for_status()
    return str(response.json()["choices"][0]["message"]["content"] or "")

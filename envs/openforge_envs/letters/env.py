"""The environment `letters`: one model call an episode; its answer becomes `answer.txt`.

The smallest environment that is whole, and the one to copy: tasks in folders, one harness in this
process (`letters`, a pipeline) and the same one as a program in the sandbox (`letters-script`, a command).
"""

import asyncio
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from openforge.env.contract import CommandAgent, EnvCallResult, HarnessKind, LlmArgs, PipelineEnv, TaskTemplate
from openforge.env.layout import load_tasks
from openforge.sandbox.contract import Sandbox, SandboxLost

HERE = Path(__file__).parent
ANSWER = "/workspace/answer.txt"
HARNESSES: dict[str, HarnessKind] = {"letters": "pipeline", "letters-script": "command"}


@cache
def tasks() -> Sequence[TaskTemplate]:
    return load_tasks(HERE / "tasks")


def create_env(sandbox: Sandbox, *, harness: str) -> PipelineEnv:
    return Letters(sandbox)


def create_command(*, harness: str, instruction: str, llm_args: LlmArgs) -> CommandAgent:
    script = "/tmp/harness/letters_script.py"
    folders = {folder for folder in (sys.prefix, sys.base_prefix) if not Path(folder).is_relative_to("/usr")}
    return CommandAgent(
        argv=(sys.executable, script, llm_args.model, instruction),
        env={"OPENAI_BASE_URL": llm_args.base_url, "OPENAI_API_KEY": llm_args.api_key},
        files={script: (HERE / "harness" / "letters_script.py").read_bytes()},
        binds={folder: folder for folder in folders},
    )


class Letters:
    """Asks once and writes the answer down."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    async def run(self, *, instruction: str, llm_args: LlmArgs, **_: Any) -> EnvCallResult:
        # a second of imports, once per process and not on the event loop
        client = await asyncio.to_thread(_import_client)
        try:
            answer = await client.ask(instruction, llm_args)
            await self._sandbox.put(ANSWER, answer.encode(errors="replace"))
        except client.ContextFull:
            return EnvCallResult(status="out_of_context")
        except client.APIError as error:
            return EnvCallResult(status="censored", cause=f"model call: {type(error).__name__}: {error}"[:400])
        except SandboxLost as error:
            return EnvCallResult(status="censored", cause=f"sandbox: {error}")
        return EnvCallResult(status="finished", metrics={"characters": float(len(answer))})


def warm_up() -> None:
    _import_client()


def _import_client() -> Any:
    from openforge_envs.letters import client

    return client

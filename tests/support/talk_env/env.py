"""An environment by path: five turns of talk with the policy, whatever it says; its last word is the work."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openforge.env.contract import EnvCallResult, HarnessKind, LlmArgs, PipelineEnv, TaskTemplate
from openforge.env.layout import load_tasks
from openforge.sandbox.contract import Sandbox

TURNS = 5
HARNESSES: dict[str, HarnessKind] = {"talk": "pipeline"}


def tasks() -> Sequence[TaskTemplate]:
    return [task for task in load_tasks(_letters_tasks()) if task.id == "letters"]


def _letters_tasks() -> Path:
    import openforge_envs.letters.env

    return Path(openforge_envs.letters.env.HERE) / "tasks"


def create_env(sandbox: Sandbox, *, harness: str, **options: Any) -> PipelineEnv:
    return Talk(sandbox)


class Talk:
    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    async def run(self, *, instruction: str, llm_args: LlmArgs, **_: Any) -> EnvCallResult:
        last = await asyncio.to_thread(talk, instruction, llm_args)
        await self._sandbox.put("/workspace/answer.txt", last.encode(errors="replace"))
        return EnvCallResult(status="finished")


def talk(instruction: str, llm_args: LlmArgs) -> str:
    from openai import OpenAI

    client = OpenAI(base_url=llm_args.base_url, api_key=llm_args.api_key)
    messages: list[Any] = [{"role": "user", "content": instruction}]
    for turn in range(TURNS):
        reply = client.chat.completions.create(model=llm_args.model, messages=messages)
        messages.append({"role": "assistant", "content": reply.choices[0].message.content or ""})
        messages.append({"role": "user", "content": f"Go on with part {turn + 2}."})
    return str(messages[-2]["content"])

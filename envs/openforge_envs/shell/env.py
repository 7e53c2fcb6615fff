"""The environment `shell`: which harnesses it can host, its tasks, and how the agent is run."""

import importlib
from collections.abc import Sequence
from functools import cache
from typing import Any

from openforge.env.contract import CommandAgent, HarnessKind, LlmArgs, PipelineEnv, TaskTemplate
from openforge.env.layout import load_tasks
from openforge.sandbox.contract import Sandbox
from openforge_envs.shell.commands import mini_command, openai_script_command
from openforge_envs.shell.instances import ShellTask
from openforge_envs.shell.mini import AtLeastOne, ConfigName, MiniPipeline
from openforge_envs.shell.words import TASKS

HARNESSES: dict[str, HarnessKind] = {"mini-swe-agent": "pipeline", "mini": "command", "openai-script": "command"}
OPTIONS_OF = {"mini": mini_command, "openai-script": openai_script_command}


@cache
def tasks() -> Sequence[TaskTemplate]:
    return [ShellTask(folder) for folder in load_tasks(TASKS)]


def create_env(
    sandbox: Sandbox, *, harness: str, config: ConfigName = "one_reply", step_limit: AtLeastOne | None = None
) -> PipelineEnv:
    """`config` names a file of `harness/`, `step_limit` overrides its limit."""
    if harness != "mini-swe-agent":
        raise ValueError(f"environment.harness = {harness!r} is no pipeline here: use mini-swe-agent")
    return MiniPipeline(sandbox, config=config, step_limit=step_limit)


def warm_up() -> None:
    """mini-swe-agent takes seconds to import."""
    importlib.import_module("openforge_envs.shell.mini_episode")


def create_command(
    *,
    harness: str,
    instruction: str,
    llm_args: LlmArgs,
    **options: Any,
) -> CommandAgent:
    match harness:
        case "mini":
            return mini_command(instruction, llm_args, **options)
        case "openai-script":
            return openai_script_command(instruction, llm_args, **options)
        case _:
            raise ValueError(f"environment.harness = {harness!r} is no command here: use mini or openai-script")

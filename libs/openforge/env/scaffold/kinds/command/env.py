"""The environment `example`: what the agent is and where its tasks lie. Copied by `openforge env new`."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from openforge.env.contract import CommandAgent, HarnessKind, LlmArgs, TaskTemplate
from openforge.env.layout import load_tasks

HERE = Path(__file__).parent
AGENT = "/tmp/agent/agent.py"

HARNESSES: dict[str, HarnessKind] = {"agent": "command"}


@cache
def tasks() -> Sequence[TaskTemplate]:
    """One folder each in `tasks/`."""
    return load_tasks(HERE / "tasks")


def create_command(
    *, harness: str, instruction: str, llm_args: LlmArgs, turns: Annotated[int, Meta(ge=1)] = 4
) -> CommandAgent:
    """The program that runs in the sandbox. Replace it with any agent that speaks Chat Completions."""
    return CommandAgent(
        argv=("python3", AGENT, instruction),
        env={
            "LLM_BASE_URL": llm_args.base_url,
            "LLM_API_KEY": llm_args.api_key,
            "LLM_MODEL": llm_args.model,
            "AGENT_TURNS": str(turns),
        },
        files={AGENT: (HERE / "agent.py").read_bytes()},
    )

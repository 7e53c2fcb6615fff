"""The environment `conformance`: every harness of `openforge.harnesses`, at one small job of several turns.

There is one task for each harness and scenario, so that one run can host all of them: with the harness `each`, the
last line of the instruction says which one does the job. In the scenario `faults` the same line tells
`openforge conformance` to break the line between harness and proxy.
"""

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import msgspec

from openforge.env.contract import CommandAgent, HarnessKind, LlmArgs, TaskInstance, TaskTemplate
from openforge.env.digest import with_digest
from openforge.env.layout import FolderTask, load_tasks
from openforge.env.variables import Split
from openforge.harnesses import ALL, Launch, NotInstalled, UnknownHarness, command, find
from openforge.harnesses.harness import mark

EACH = "each"
HARNESSES: dict[str, HarnessKind] = {EACH: "command", **{harness.name: "command" for harness in ALL}}
_MARKED = re.compile(re.escape(mark("HARNESS", "SCENARIO")).replace("HARNESS", r"(\S+)").replace("SCENARIO", r"(\w+)"))


class Job:
    """The job, for one harness in one scenario."""

    def __init__(self, folder: FolderTask, harness: str, scenario: str) -> None:
        self.id = f"{harness}_{scenario}"
        self._folder = folder
        self._mark = mark(harness, scenario)

    def draw(self, seed: int, split: Split) -> TaskInstance:
        drawn = self._folder.draw(seed, split)
        instruction = f"{drawn.instruction}\n{self._mark}"
        return with_digest(msgspec.structs.replace(drawn, task=self.id, instruction=instruction))


@cache
def tasks() -> Sequence[TaskTemplate]:
    (job,) = load_tasks(Path(__file__).parent / "job")
    return [Job(job, harness.name, scenario) for harness in ALL for scenario in harness.scenarios]


def create_command(*, harness: str, instruction: str, llm_args: LlmArgs, context: int = 32768) -> CommandAgent:
    """`context` is the window that the harness is told. Raises `ValueError`."""
    marked = _MARKED.search(instruction)
    launch = Launch(
        base_url=llm_args.base_url.removesuffix("/v1"),
        key=llm_args.api_key,
        model=llm_args.model,
        instruction=instruction,
        context=context,
        max_tokens=llm_args.max_tokens,
        scenario=marked[2] if marked else "plain",
    )
    try:
        return command(find(_named(marked) if harness == EACH else harness), launch)
    except (NotInstalled, UnknownHarness) as error:
        raise ValueError(str(error)) from error


def _named(marked: re.Match[str] | None) -> str:
    if marked is None:
        raise ValueError(f"harness = {EACH!r} needs a task of the environment conformance, whose last line names one")
    return marked[1]

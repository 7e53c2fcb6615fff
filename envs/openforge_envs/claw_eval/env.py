"""The environment `claw_eval`: ClawEval's tasks by our own loop, each tool call one request to a mock service.

`OPENFORGE_CLAW_EVAL` names a checkout; without it these are the two tasks that lie here, written for OpenForge in the
same format. Tasks of a checkout that cannot be kept here are left out (docs/environments.md says which).
"""

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from openforge.env.claw_eval import SYSTEM, ClawEvalTools, load_claw_eval_tasks
from openforge.env.contract import DirectEnv, HarnessKind, TaskTemplate
from openforge.sandbox.contract import Sandbox

HERE = Path(__file__).parent
CHECKOUT = "OPENFORGE_CLAW_EVAL"
HARNESSES: dict[str, HarnessKind] = {"react": "direct"}


@cache
def tasks() -> Sequence[TaskTemplate]:
    checkout = os.environ.get(CHECKOUT)
    return load_claw_eval_tasks(checkout, unsupported="leave out") if checkout else load_claw_eval_tasks(HERE)


def create_direct(sandbox: Sandbox, *, harness: str, system: str = SYSTEM) -> DirectEnv:
    """`system` replaces the first message."""
    return ClawEvalTools(sandbox, system=system)

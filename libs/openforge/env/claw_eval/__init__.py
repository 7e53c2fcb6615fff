"""Task folders of ClawEval: `task.yaml`, `grader.py`, `fixtures/`, mock services that several tasks share.

from openforge.env.claw_eval import ClawEvalTools, load_claw_eval_tasks
HARNESSES = {"react": "direct"}
def tasks(): return load_claw_eval_tasks(CHECKOUT)
def create_direct(sandbox, *, harness, **options): return ClawEvalTools(sandbox, **options)
"""

from openforge.env.claw_eval.agent import SYSTEM, ClawEvalTools
from openforge.env.claw_eval.loader import ClawEvalTask, load_claw_eval_tasks

__all__ = ["SYSTEM", "ClawEvalTask", "ClawEvalTools", "load_claw_eval_tasks"]

"""Which task a group works on.

Promises: every task comes once in each round of all tasks, in an order that only the run's seed and
the round decide; no two groups of a run share an instance, and held-out groups none with training.
"""

import hashlib
import random
from collections.abc import Sequence
from typing import Literal

from openforge.protos import TaskRef

GROUPS_PER_SEED = 10_000_000


def drawn_task(
    env: str, tasks: Sequence[str], *, run_seed: int, ordinal: int, split: Literal["train", "heldout"]
) -> TaskRef:
    """The task of the group with this ordinal: the same before and after training."""
    round_of_tasks, place = divmod(ordinal, len(tasks))
    order = sorted(tasks)
    random.Random(f"{run_seed}/{split}/{round_of_tasks}").shuffle(order)
    instance = 2 * (run_seed * GROUPS_PER_SEED + ordinal) + (split == "heldout")
    return TaskRef(env=env, task=order[place], seed=instance, split=split)


def sampling_seed(run_seed: int, episode: str, attempt: int) -> int:
    """31 bits that differ between all attempts of a run."""
    digest = hashlib.sha256(f"{run_seed}/{episode}/{attempt}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1

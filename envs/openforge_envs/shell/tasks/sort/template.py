"""Lines in an order that is not yet the sorted one."""

import random
from typing import Literal

from openforge_envs.shell.words import words


def draw(rng: random.Random, split: Literal["train", "heldout"]) -> dict[str, str]:
    lines = rng.sample(words(split), rng.randint(3, 6))
    if lines == sorted(lines):
        lines.reverse()
    return {"lines": "\n".join(lines), "sorted_lines": "\n".join(sorted(lines))}

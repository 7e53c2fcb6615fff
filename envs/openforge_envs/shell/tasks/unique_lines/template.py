"""Lines of which some come twice."""

import random
from typing import Literal

from openforge_envs.shell.words import words


def draw(rng: random.Random, split: Literal["train", "heldout"]) -> dict[str, str]:
    unique = rng.sample(words(split), rng.randint(3, 5))
    lines = unique + rng.sample(unique, 2)
    rng.shuffle(lines)
    return {"lines": "\n".join(lines), "unique": "\n".join(sorted(unique))}

"""Some lines of words and the last of them."""

import random
from typing import Literal

from openforge_envs.shell.words import lines_of_words


def draw(rng: random.Random, split: Literal["train", "heldout"]) -> dict[str, str]:
    lines = lines_of_words(rng, split, rng.randint(5, 9))
    count = rng.randint(2, 4)
    return {"lines": "\n".join(lines), "count": str(count), "last_lines": "\n".join(lines[-count:])}

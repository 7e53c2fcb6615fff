"""Some lines of words and how many there are."""

import random
from typing import Literal

from openforge_envs.shell.words import lines_of_words


def draw(rng: random.Random, split: Literal["train", "heldout"]) -> dict[str, str]:
    lines = lines_of_words(rng, split, rng.randint(2, 12))
    return {"lines": "\n".join(lines), "count": str(len(lines))}

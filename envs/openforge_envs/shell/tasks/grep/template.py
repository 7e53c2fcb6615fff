"""Some lines of words, some with the needle."""

import random
from typing import Literal

from openforge_envs.shell.words import lines_of_words


def draw(rng: random.Random, split: Literal["train", "heldout"]) -> dict[str, str]:
    lines = lines_of_words(rng, split, rng.randint(5, 8))
    needle = rng.choice(" ".join(lines).split())
    matches = [line for line in lines if needle in line.split()]
    return {"lines": "\n".join(lines), "needle": needle, "matches": "\n".join(matches)}

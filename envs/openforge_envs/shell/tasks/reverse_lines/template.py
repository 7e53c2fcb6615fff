"""Some lines of words, also from the last to the first."""

import random
from typing import Literal

from openforge_envs.shell.words import lines_of_words


def draw(rng: random.Random, split: Literal["train", "heldout"]) -> dict[str, str]:
    lines = lines_of_words(rng, split, rng.randint(3, 6))
    return {"lines": "\n".join(lines), "reversed_lines": "\n".join(reversed(lines))}

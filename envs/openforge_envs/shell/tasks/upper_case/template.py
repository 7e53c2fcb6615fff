"""Some lines of words, also in capitals."""

import random
from typing import Literal

from openforge_envs.shell.words import lines_of_words


def draw(rng: random.Random, split: Literal["train", "heldout"]) -> dict[str, str]:
    text = "\n".join(lines_of_words(rng, split, rng.randint(2, 4)))
    return {"lines": text, "capitals": text.upper()}

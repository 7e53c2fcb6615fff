"""Three names, also in the order in which `ls` has them."""

import random
from typing import Literal

from openforge_envs.shell.words import words


def draw(rng: random.Random, split: Literal["train", "heldout"]) -> dict[str, str]:
    first, second, third = names = [f"{word}.txt" for word in rng.sample(words(split), 3)]
    text = rng.choice(words(split))
    return {"first": first, "second": second, "third": third, "text": text, "names": "\n".join(sorted(names))}

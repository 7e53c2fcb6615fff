"""Numbers, one a line, and their sum."""

import random
from typing import Literal


def draw(rng: random.Random, split: Literal["train", "heldout"]) -> dict[str, str]:
    numbers = [rng.randint(1, 99) for _ in range(rng.randint(3, 8))]
    return {"numbers": "\n".join(str(number) for number in numbers), "sum": str(sum(numbers))}

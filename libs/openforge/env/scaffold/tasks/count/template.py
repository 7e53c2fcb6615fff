"""Variables that word lists and ranges cannot draw: here a text and its number of lines."""

import random


def draw(rng: random.Random, split: str) -> dict[str, str | int]:
    lines = ["".join(rng.choices("abcdefgh", k=5)) for _ in range(rng.randint(3, 12))]
    return {"lines": "\n".join(lines), "count": len(lines)}

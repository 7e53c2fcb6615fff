"""The words that names and contents are made of: one list for training, another for held-out instances."""

import random
from functools import cache
from pathlib import Path

import yaml

from openforge.env.variables import Split

TASKS = Path(__file__).parent / "tasks"


@cache
def words(split: Split) -> tuple[str, ...]:
    return tuple(yaml.safe_load((TASKS / "words.yaml").read_text())["word"][split])


def lines_of_words(rng: random.Random, split: Split, count: int, *, longest: int = 5) -> list[str]:
    """`count` lines of one to `longest` different words."""
    return [" ".join(rng.sample(words(split), rng.randint(1, longest))) for _ in range(count)]

"""What differs between the instances of a task: variables, drawn by seed from word lists and ranges.

Promises: training and held-out instances draw from lists that share no word; the words that one
instance draws from one list are all different; the order in the file is the order of drawing.
"""

import random
from collections.abc import Mapping
from typing import Literal

import msgspec

from openforge.env.placeholders import UnknownVariable, fill

Split = Literal["train", "heldout"]


class BadVariables(ValueError):
    """The variables or word lists of a task cannot be drawn from."""


class WordList(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`train` and `heldout` share no word."""

    train: tuple[str, ...]
    heldout: tuple[str, ...]


class Variable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one variable is drawn; exactly one of `words`, `one_of`, `between` and `text` is given.

    `words` names a word list: `count` different words are joined by `joined_by`. `one_of` are values that
    both splits use. `between` is an inclusive range of integers. `text` is made of other variables.
    """

    words: str | None = None
    count: int = 1
    joined_by: str = "\n"
    one_of: tuple[str | int, ...] | None = None
    between: tuple[int, int] | None = None
    text: str | None = None


def check_words(lists: Mapping[str, WordList]) -> None:
    """Raises `BadVariables` where a list is empty, repeats a word or shares one between the splits."""
    for name, words in lists.items():
        for split, drawn in (("train", words.train), ("heldout", words.heldout)):
            if not drawn:
                raise BadVariables(f"words.{name}.{split} is empty: list at least one word")
            if len(set(drawn)) < len(drawn):
                raise BadVariables(f"words.{name}.{split} lists a word twice: remove one")
        shared = sorted(set(words.train) & set(words.heldout))
        if shared:
            raise BadVariables(f"words.{name}: {shared[0]!r} is both in train and in heldout: keep it in one of them")


def check_variables(variables: Mapping[str, Variable], lists: Mapping[str, WordList]) -> None:
    """Raises `BadVariables` where a variable could not be drawn from `lists`."""
    for name, variable in variables.items():
        if not name.isidentifier():
            raise BadVariables(f"variables.{name} is no name: use letters, digits and _")
        _check_variable(name, variable, lists)
    for list_name, words in lists.items():
        needed = sum(variable.count for variable in variables.values() if variable.words == list_name)
        have = min(len(words.train), len(words.heldout))
        if needed > have:
            raise BadVariables(f"variables draw {needed} words from {list_name!r}, which has {have}: add words to it")


def draw_variables(
    variables: Mapping[str, Variable], lists: Mapping[str, WordList], rng: random.Random, split: Split
) -> dict[str, str]:
    """One value for each variable."""
    left = {name: list(words.train if split == "train" else words.heldout) for name, words in lists.items()}
    drawn: dict[str, str] = {}
    for name, variable in variables.items():
        drawn[name] = _draw(name, variable, left, drawn, rng)
    return drawn


def _check_variable(name: str, variable: Variable, lists: Mapping[str, WordList]) -> None:
    given = [key for key in ("words", "one_of", "between", "text") if getattr(variable, key) is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise BadVariables(f"variables.{name} has {found}: give exactly one of words, one_of, between and text")
    if variable.words is not None and variable.words not in lists:
        known = ", ".join(sorted(lists)) or "none"
        raise BadVariables(f"variables.{name}.words = {variable.words!r} is no word list: there are {known}")
    if variable.count < 1:
        raise BadVariables(f"variables.{name}.count = {variable.count}: use 1 or more")
    if variable.one_of == ():
        raise BadVariables(f"variables.{name}.one_of is empty: list at least one value")
    if variable.between is not None and variable.between[0] > variable.between[1]:
        raise BadVariables(f"variables.{name}.between = {list(variable.between)}: put the smaller number first")


def _draw(
    name: str, variable: Variable, left: dict[str, list[str]], drawn: Mapping[str, str], rng: random.Random
) -> str:
    if variable.words is not None:
        words = left[variable.words]
        return variable.joined_by.join(words.pop(rng.randrange(len(words))) for _ in range(variable.count))
    if variable.one_of is not None:
        return str(rng.choice(variable.one_of))
    if variable.between is not None:
        return str(rng.randint(*variable.between))
    try:
        return fill(variable.text or "", drawn)
    except UnknownVariable as error:
        raise BadVariables(f"variables.{name}.text: {error} before it") from error

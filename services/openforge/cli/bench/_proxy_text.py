"""What is said in `bench proxy`: a tokenizer that reads words, and conversations of a known length.

Promises: the same name gives the same conversation, two names give two that have no text in common.
"""

import random
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

BYTES_PER_TOKEN = 5
FIRST_TOKENS = 6_000
GROWTH_TOKENS = 400
TURNS = 10
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_SYLLABLES = [first + second for first in "bdfgklmnprstvz" for second in "aeiou"]


def _words() -> list[str]:
    """2,000 words of four letters."""
    pairs = [first + second for first in _SYLLABLES for second in _SYLLABLES]
    return random.Random(0).sample(pairs, 2_000)


_WORDS = _words()


def model_folder(path: Path) -> Path:
    """A byte-level tokenizer that learned the words: nearly every word is one token, as in a real one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=6_000,
        show_progress=False,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in _SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([" " + " ".join(_WORDS)], trainer)
    path.mkdir()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def tokenizer_of(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


class Conversation:
    """One episode's: a system prompt and a task, then answers and results of about 200 tokens each."""

    def __init__(self, name: str) -> None:
        self._rng = random.Random(name)
        self._later = [self._text(GROWTH_TOKENS // 2) for _ in range(TURNS - 1)]
        self.messages: list[dict[str, Any]] = [
            {"role": "system", "content": self._text(2_000)},
            {"role": "user", "content": self._text(FIRST_TOKENS - 2_000)},
        ]

    def goes_on(self, answer: str) -> None:
        self.messages.append({"role": "assistant", "content": answer})
        if self._later:
            self.messages.append({"role": "user", "content": self._later.pop()})

    def _text(self, words: int) -> str:
        return " ".join(self._rng.choices(_WORDS, k=words))

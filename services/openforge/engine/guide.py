"""Guides: which tokens an answer may go on with, so that it matches a JSON schema or a grammar.

Promises: a guided answer that ends by itself matches; what cannot be a guide is refused before anything is computed.
The grammars are those of the library `llguidance`.
"""

from collections.abc import Callable
from pathlib import Path

import llguidance
import numpy as np
import torch

from openforge.wire.generate import StructuredOutputs


class BadGuide(ValueError):
    """The schema or the grammar cannot be read."""


class Guide:
    """The way through one answer: `allowed` for the next token, then `take` the one that was sampled."""

    def __init__(self, matcher: llguidance.LLMatcher, vocabulary: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    def allowed(self) -> torch.Tensor:
        """Shape (vocabulary,), of bool; at least one token is allowed."""
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        return torch.from_numpy(bits[: self._vocabulary].astype(np.bool_))

    def take(self, token: int) -> None:
        self._matcher.consume_token(token)


class Guides:
    """Makes guides for one tokenizer. Its tries are built once for each end token, when they are first needed."""

    def __init__(self, tokenizer: Path, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._by_end: dict[int, llguidance.LLTokenizer] = {}

    def make(self, wanted: StructuredOutputs, end_token_id: int) -> Guide:
        """Raises `BadGuide`."""
        if (wanted.json is None) == (wanted.grammar is None):
            raise BadGuide("send json or grammar, one of them")
        tokens = self._by_end.get(end_token_id) or self._tokens(end_token_id)
        grammar = wanted.grammar if wanted.grammar is not None else _of_schema(wanted.json or "")
        if complaint := llguidance.LLMatcher.validate_grammar(grammar, tokens):
            raise BadGuide(complaint.strip())
        return Guide(llguidance.LLMatcher(tokens, grammar), self._vocabulary)

    def _tokens(self, end_token_id: int) -> llguidance.LLTokenizer:
        text = self._tokenizer.read_text(encoding="utf-8")
        made = llguidance.LLTokenizer(text, n_vocab=self._vocabulary, eos_token=end_token_id)
        self._by_end[end_token_id] = made
        return made


def _of_schema(schema: str) -> str:
    """Keywords that the library does not know are left out, as servers do."""
    make: Callable[..., str] = llguidance.LLMatcher.grammar_from_json_schema
    try:
        return make(schema, overrides={"lenient": True})
    except ValueError as error:
        raise BadGuide(str(error)) from error

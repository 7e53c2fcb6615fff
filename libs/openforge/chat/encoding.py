"""Text to token ids and back, as the tokenizer of Hugging Face has it.

Promises: the ids are those of `tokenizers`. `fastokens` writes them where it is installed and agrees on every probe: it
takes a tenth of the time and less.
"""

import logging
from array import array
from collections.abc import Callable, Iterable, Sequence

from tokenizers import Tokenizer

try:
    import fastokens
except ImportError:  # no wheel for this platform
    fastokens = None

logger = logging.getLogger("openforge.chat")

Encode = Callable[[str], "array[int]"]
Decode = Callable[[Sequence[int]], str]

_PIECES = (
    *("the", "Of", " a", "def f(x):", "x_1", "can't", "I'LL", "ÄÖ", "naïve", "e\u0301", "İ", "ß", "ﬁ", "中文", "漢"),
    *(
        "ひ",
        "한",
        "عر",
        "\u0663",
        "½",
        "²",
        "0",
        "12",
        "2024",
        "3.14",
        "🙂",
        "👩\u200d👩\u200d👧",
        "\U0001f1e9\U0001f1ea",
    ),
    *("\u200b", "\ufeff", "\u00a0", "\u2028", "\x00", "\x85", " ", "  ", "\n", "\n\n", "\r\n", "\t", " \n ", "..."),
    *("==", "->", "'", '"', "\\", "{", "}", "<", "</", "_", "-", "$$", "#"),
)
"""Where tokenizers part ways: white space, digits, case, marks that combine, scripts, what is no text at all."""


def coder(tokenizer: Tokenizer) -> tuple[Encode, Decode]:
    """How to encode and to decode, special tokens encoded as such and left out of the text."""

    def encode(text: str) -> "array[int]":
        [encoded] = tokenizer.encode_batch_fast([text], add_special_tokens=False)  # without where each token stands
        return array("i", encoded.ids)

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))

    quick = None if fastokens is None else _quick(tokenizer)
    if quick is None or not agree((encode, decode), quick, probes_of(tokenizer)):
        logger.info("text is tokenised without fastokens", extra={"fields": {"installed": fastokens is not None}})
        return encode, decode
    return quick


def _quick(tokenizer: Tokenizer) -> tuple[Encode, Decode] | None:
    """None for a tokenizer that it does not know."""
    try:
        quick = fastokens.Tokenizer.from_json_str(tokenizer.to_str())
    except ValueError:
        return None

    def encode(text: str) -> "array[int]":
        ids = array("i")
        ids.frombytes(quick.encode_batch_flat([text])[0])
        return ids

    def decode(ids: Sequence[int]) -> str:
        return str(quick.decode(list(ids), skip_special_tokens=True))

    return encode, decode


def agree(one: tuple[Encode, Decode], other: tuple[Encode, Decode], probes: Iterable[str]) -> bool:
    """Whether both give the same ids for every probe, and the same text for its ids and the first of them."""
    for probe in probes:
        ids = one[0](probe)
        if other[0](probe) != ids or any(other[1](ids[:size]) != one[1](ids[:size]) for size in (len(ids), 1)):
            return False
    return True


def probes_of(tokenizer: Tokenizer) -> Iterable[str]:
    """Any two pieces that follow one another, special tokens among them."""
    special = [added.content for added in tokenizer.get_added_tokens_decoder().values()]
    for first in (*_PIECES, *special):
        yield first
        yield "".join(first + second for second in (*_PIECES, *special[:3]))

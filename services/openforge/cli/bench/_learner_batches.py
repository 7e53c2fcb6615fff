"""The batches of `bench learner`. The same arguments give the same batch."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from openforge.learner.aggregation import token_weights
from openforge.learner.packing import TrainSequence, pack

ROW_TOKENS = 2048
SEQUENCES, MEDIAN, P99_OVER_P50 = 256, 300, 10.0
_SIGMA = math.log(P99_OVER_P50) / 2.3263478740408408  # the 0.99 quantile of a standard normal
PROMPT, COMPLETIONS, SHORTEST, LONGEST = 1024, 8, 64, 160


def long_tailed(vocabulary: int, count: int = SEQUENCES) -> list[TrainSequence]:
    """Log-normal lengths, none above a row, nothing in common; the first quarter of each is its prompt."""
    rng = random.Random(0)
    lengths = [min(ROW_TOKENS, max(8, round(MEDIAN * math.exp(_SIGMA * rng.gauss(0, 1))))) for _ in range(count)]
    return _sequences([(_ids(rng, length, vocabulary), length // 4) for length in lengths], rng)


def one_group(vocabulary: int) -> list[TrainSequence]:
    """Completions of one prompt."""
    rng = random.Random(0)
    prompt = _ids(rng, PROMPT, vocabulary)
    answers = [_ids(rng, rng.randint(SHORTEST, LONGEST), vocabulary) for _ in range(COMPLETIONS)]
    return _sequences([([*prompt, *answer], PROMPT) for answer in answers], rng)


def packing_efficiency(sequences: Sequence[TrainSequence]) -> float:
    """The share of full rows that holds tokens, where rows are filled up as on a GPU."""
    rows = pack(sequences, ROW_TOKENS, ROW_TOKENS)
    return sum(len(row.ids_T) for row in rows) / (ROW_TOKENS * len(rows))


def _sequences(texts: Sequence[tuple[list[int], int]], rng: random.Random) -> list[TrainSequence]:
    """From ids and where the prompt ends. All after it is trained, sampled at temperature 1."""
    weights = token_weights([len(ids_T) - prompt for ids_T, prompt in texts], range(len(texts)), "token_mean")
    return [
        TrainSequence(
            ids_T=ids_T,
            at_K=list(range(prompt, len(ids_T))),
            mu_logprobs_K=[-rng.uniform(6.0, 9.0) for _ in ids_T[prompt:]],
            advantage=rng.choice((-1.0, 1.0)),
            weight=weight,
            temperature=1.0,
        )
        for (ids_T, prompt), weight in zip(texts, weights, strict=True)
    ]


def _ids(rng: random.Random, count: int, vocabulary: int) -> list[int]:
    return [rng.randrange(3, vocabulary) for _ in range(count)]

"""How much each token counts in the loss of a step.

Promises: weights run over the whole optimizer step, so that cutting it into rows, ranks and micro-batches changes
nothing; sequences without loss tokens count nowhere; a token that a correction gives no weight stays in
the denominator, and so do tokens without advantage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

Aggregation = Literal["token_mean", "sequence_mean", "episode_mean", "constant"]


def token_weights(
    loss_tokens_S: Sequence[int], episode_S: Sequence[int], aggregation: Aggregation, horizon: int = 0
) -> list[float]:
    """The weight of each loss token of each of the S sequences of a whole step; `episode_S` says whose they are.

    token_mean: 1 / loss tokens of the step (DAPO, arXiv 2503.14476). sequence_mean: mean over sequences of the mean
    over tokens (GRPO, arXiv 2402.03300; GSPO), so an episode counts as often as it has branches. episode_mean: mean
    over episodes of the mean over all their tokens: every episode counts alike, however long and branched. constant:
    sum over tokens / (episodes * horizon) (Dr.GRPO, arXiv 2503.20783). All but `constant` sum to 1.
    """
    tokens_of = Counter[int]()
    for episode, tokens in zip(episode_S, loss_tokens_S, strict=True):
        tokens_of[episode] += tokens
    step_tokens = sum(loss_tokens_S)
    episodes = sum(1 for tokens in tokens_of.values() if tokens)
    sequences = sum(1 for tokens in loss_tokens_S if tokens)

    def weight(tokens: int, episode: int) -> float:
        match aggregation:
            case "token_mean":
                return 1.0 / step_tokens
            case "sequence_mean":
                return 1.0 / (sequences * tokens)
            case "episode_mean":
                return 1.0 / (episodes * tokens_of[episode])
            case "constant":
                return 1.0 / (episodes * horizon)

    return [
        weight(tokens, episode) if tokens else 0.0 for tokens, episode in zip(loss_tokens_S, episode_S, strict=True)
    ]

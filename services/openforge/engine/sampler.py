"""Drawing the next token of many requests at once.

Promises: the log-prob that comes back is that of the distribution really drawn from (after temperature, top_k and
top_p, a guide), in float32; at temperature 0 the likeliest token is taken and its log-prob is the unscaled one.
"""

from collections.abc import Sequence

import msgspec
import torch

IMPOSSIBLE = -9999.0  # vLLM's number for a token that the distribution excludes
_LIKELY = 512  # top_p looks at this many tokens before it sorts all of them


class Draw(msgspec.Struct, frozen=True):
    """How one request's next token is drawn. `uniform` in [0, 1) is its luck, `forced` overrides the choice, `allowed`
    is a mask over the vocabulary.
    """

    temperature: float
    top_k: int
    top_p: float
    uniform: float
    forced: int | None = None
    allowed: torch.Tensor | None = None


def sample(logits_NV: torch.Tensor, draws: Sequence[Draw]) -> tuple[list[int], list[float]]:
    """Token ids and log-probs. Overwrites the logits."""
    _guide(logits_NV, draws)
    _scale(logits_NV, draws)
    _cut(logits_NV, draws)
    peak = logits_NV.amax(1, keepdim=True)
    weights = (logits_NV - peak).exp_()
    total = weights.sum(1)
    ids = _pick(weights, draws)
    _override(ids, logits_NV, draws)
    scores = logits_NV.gather(1, ids[:, None])[:, 0] - peak[:, 0] - total.log()
    return ids.tolist(), scores.clamp_(min=IMPOSSIBLE).tolist()


def sample_apart(logits_NV: torch.Tensor, draws: Sequence[Draw]) -> tuple[list[int], list[float]]:
    """As `sample`, row by row: with several threads the order of a row's sums depends on how many rows there are."""
    drawn = [sample(row[None], [draw]) for row, draw in zip(logits_NV, draws, strict=True)]
    return [ids[0] for ids, _ in drawn], [logprobs[0] for _, logprobs in drawn]


def _guide(logits: torch.Tensor, draws: Sequence[Draw]) -> None:
    """A token that alone is allowed gets log-prob 0."""
    for index, draw in enumerate(draws):
        if draw.allowed is not None:
            logits[index].masked_fill_(~draw.allowed, -torch.inf)


def _scale(logits: torch.Tensor, draws: Sequence[Draw]) -> None:
    if any(draw.temperature not in (0.0, 1.0) for draw in draws):
        temperatures = torch.tensor([draw.temperature or 1.0 for draw in draws])
        logits.div_(temperatures[:, None])


def _cut(logits: torch.Tensor, draws: Sequence[Draw]) -> None:
    vocabulary = logits.shape[1]
    for index, draw in enumerate(draws):
        if draw.temperature == 0.0:
            continue
        row = logits[index]
        if 0 < draw.top_k < vocabulary:
            lowest = row.topk(draw.top_k).values[-1]
            row.masked_fill_(row < lowest, -torch.inf)
        if draw.top_p < 1.0:
            row.masked_fill_(row < _lowest_of_nucleus(row, draw.top_p), -torch.inf)


def _lowest_of_nucleus(row: torch.Tensor, top_p: float) -> torch.Tensor:
    """The score of the last token of the smallest set of likeliest tokens that weighs at least `top_p`."""
    whole = row.logsumexp(0)
    best = row.topk(min(_LIKELY, len(row))).values
    if (best - whole).exp().sum() < top_p:
        best = row.sort(descending=True).values
    mass_before = (best - whole).exp().cumsum(0).roll(1)
    mass_before[0] = 0.0
    return best[int((mass_before < top_p).sum()) - 1]


def _pick(weights: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """By inverse cumulative distribution: one uniform number a token, whatever the batch around it."""
    cumulative = weights.cumsum(1)
    whole = cumulative[:, -1]
    targets = torch.tensor([draw.uniform for draw in draws], dtype=torch.float64) * whole
    below = torch.minimum(targets.float(), torch.nextafter(whole, torch.zeros(())))
    return torch.searchsorted(cumulative, below[:, None], right=True)[:, 0]


def _override(ids: torch.Tensor, logits: torch.Tensor, draws: Sequence[Draw]) -> None:
    for index, draw in enumerate(draws):
        if draw.forced is not None:
            ids[index] = draw.forced
        elif draw.temperature == 0.0:
            ids[index] = logits[index].argmax()

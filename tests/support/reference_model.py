"""What a model's log-probs really are: the whole sequence through the reference implementation, nothing cached."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch


@lru_cache(maxsize=8)
def _reference(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def reference_logits(folder: Path, tokens: Sequence[int]) -> torch.Tensor:
    """(T, V) in float32."""
    with torch.inference_mode():
        logits: torch.Tensor = _reference(folder)(torch.tensor([list(tokens)])).logits[0]
        return logits


def reference_logprobs(
    folder: Path, prompt: Sequence[int], answer: Sequence[int], temperature: float = 1.0
) -> list[float]:
    """The log-prob of each answer token."""
    scores = (reference_logits(folder, [*prompt, *answer])[len(prompt) - 1 : -1] / temperature).log_softmax(-1)
    return [float(row[token]) for row, token in zip(scores, answer, strict=True)]


def reference_router_probabilities(folder: Path, tokens: Sequence[int]) -> torch.Tensor:
    """What each layer's router says of each expert, (T, layers, experts)."""
    with torch.inference_mode():
        said = _reference(folder)(torch.tensor([list(tokens)]), output_router_logits=True).router_logits
        return torch.stack([logits_TE.float().softmax(-1) for logits_TE in said], dim=1)


def assert_chosen_by(probabilities_TLE: torch.Tensor, chosen_TLk: Any) -> None:
    """These are the most probable experts, in order; what is as probable up to rounding counts as such."""
    chosen = torch.from_numpy(chosen_TLk.astype("int64"))
    best = probabilities_TLE.topk(chosen.shape[-1]).values
    assert chosen.shape == best.shape
    assert torch.allclose(probabilities_TLE.gather(-1, chosen), best, atol=1e-5)
    assert bool((chosen[..., 0] != chosen[..., 1]).all())


def largest_difference(a: Sequence[float], b: Sequence[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))

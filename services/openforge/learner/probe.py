"""What the weights say to a fixed prompt, so that whoever loads them can check the load.

Promises: computed with the weights as they are written (cast), in float32, at temperature 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from openforge.weights import Probe

if TYPE_CHECKING:
    from torch import Tensor

PROMPT_TOKENS = 8
ANSWER_TOKENS = 4


def probe(model: Any, tensors: Mapping[str, Tensor], dtype: str) -> Probe:
    """Greedy continuation of a fixed prompt by `model` with `tensors` in the place of its own weights."""
    import torch
    from torch.func import functional_call

    cast = {name: tensor.to(getattr(torch, dtype)).float() for name, tensor in tensors.items()}
    prompt_ids = _prompt(model.config.vocab_size)
    ids, logprobs = list(prompt_ids), list[float]()
    with torch.no_grad():
        for _ in range(ANSWER_TOKENS):
            logits_1TV = functional_call(
                model, cast, kwargs={"input_ids": torch.tensor([ids]), "use_cache": False, "logits_to_keep": 1}
            ).logits
            logprobs_V = logits_1TV[0, -1].float().log_softmax(-1)
            best = int(logprobs_V.argmax())
            ids.append(best)
            logprobs.append(float(logprobs_V[best]))
    return Probe(prompt_ids=prompt_ids, token_ids=tuple(ids[PROMPT_TOKENS:]), logprobs=tuple(logprobs))


def _prompt(vocabulary: int) -> tuple[int, ...]:
    """Ids spread over the vocabulary."""
    return tuple((11 + 7919 * index) % vocabulary for index in range(PROMPT_TOKENS))

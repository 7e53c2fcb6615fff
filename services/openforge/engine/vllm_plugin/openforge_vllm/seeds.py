"""Prompts in pieces beside seeds on a CPU.

vLLM draws a token for every request of a step, and of one whose prompt goes on in the next step it throws the token
away and sets the request's random numbers back. A CPU's generator cannot be set back, and the server dies of the try
(0.32: `GPUModelRunner._bookkeeping_sync`). Here such a request's generator is put aside before anything is drawn.
"""

from typing import Any

import numpy as np
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

_ASIDE = "_openforge_generators"


def put_aside_in_unfinished_prompts() -> None:
    """From now on, in this process; may be called again."""
    if hasattr(GPUModelRunner, _ASIDE):
        return
    draw, book = GPUModelRunner._sample, GPUModelRunner._bookkeeping_sync

    def _sample(self: Any, *args: Any, **named: Any) -> Any:
        generators, requests = self.input_batch.generators, self.input_batch.num_reqs
        unfinished = np.nonzero(self.discard_request_mask.np[:requests])[0].tolist()
        setattr(self, _ASIDE, {index: generators.pop(index) for index in unfinished if index in generators})
        return draw(self, *args, **named)

    def _bookkeeping_sync(self: Any, *args: Any, **named: Any) -> Any:
        kept = book(self, *args, **named)
        self.input_batch.generators.update(getattr(self, _ASIDE))
        return kept

    setattr(GPUModelRunner, _ASIDE, {})
    GPUModelRunner._sample = _sample
    GPUModelRunner._bookkeeping_sync = _bookkeeping_sync

"""A network and its optimizer, sharded over the ranks.

Promises: a step adds up the gradients of all rows of all ranks, clips them as one and moves the weights once;
without a single row it is still a step, with zero gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from openforge.learner.backends import ranks
from openforge.learner.backends.measured import Measured
from openforge.runs.config import LearnerSection


class Trained:
    """Only parameters that require a gradient are trained."""

    def __init__(self, network: Any, settings: LearnerSection, learning_rate: float, device: torch.device) -> None:
        self.network = network
        self.device = device
        self._settings = settings
        self._base_rate = learning_rate
        ranks.shard(network, device)
        self.parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=learning_rate, betas=settings.betas, weight_decay=settings.weight_decay, fused=True
        )

    def step(self, rows: Sequence[Measured], loss_of: Callable[[Measured], Tensor], step: int) -> float:
        """One optimizer step; returns the norm of the gradient before clipping. `loss_of` forwards a row."""
        self.optimizer.zero_grad()
        for index, row in enumerate(rows):
            ranks.reduce_gradients(self.network, index == len(rows) - 1)
            (loss_of(row) * (row.share * ranks.world())).backward()
        self._fill_gradients()
        return self._update(step)

    def _fill_gradients(self) -> None:
        """What no row reached has a gradient of zero: without a single row the step is still one."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _update(self, step: int) -> float:
        limit = self._settings.gradient_clip or float("inf")
        norm = ranks.whole(torch.nn.utils.clip_grad_norm_(self.parameters, limit)).item()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self._settings, self._base_rate, step)
        self.optimizer.step()
        return float(norm)


def learning_rate(settings: LearnerSection, base_rate: float, step: int) -> float:
    """Up over `warmup_steps`, then down so that step `decay_steps` would have none; steps count from 0."""
    warmup, horizon = settings.warmup_steps, settings.decay_steps
    if step < warmup:
        return base_rate * (step + 1) / warmup
    if not horizon:
        return base_rate
    return base_rate * max(0.0, (horizon - step) / max(1, horizon - warmup))

"""A row and what was computed for its tokens before the step, with weights that the step does not move."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from openforge.learner.backends.forward import RowTensors
from openforge.learner.objective import LossTokens
from openforge.learner.packing import Row


class Measured(NamedTuple):
    """`share` is 1, or 0 for a row that only keeps the ranks in step. All tensors are of the row's N loss tokens."""

    row: Row
    share: float
    proximal_N: Tensor | None = None
    reference_N: Tensor | None = None
    values_N: Tensor | None = None
    advantages_N: Tensor | None = None
    returns_N: Tensor | None = None

    def tensors(self, device: torch.device) -> RowTensors:
        """The row on the device. Made when it is its turn: a mask is the square of a row."""
        return RowTensors.of(self.row, device)

    def tokens(self, row: RowTensors, logprobs_N: Tensor) -> LossTokens:
        return LossTokens(
            logprobs_N=logprobs_N,
            mu_logprobs_N=row.mu_logprobs_N,
            advantages_N=row.advantage_N if self.advantages_N is None else self.advantages_N,
            sequence_N=row.sequence_N,
            proximal_N=self.proximal_N,
            reference_N=self.reference_N,
        )

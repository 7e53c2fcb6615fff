"""What the learner asks of whatever computes the policy.

Promises of every backend: the same sequences in the same order from the same state give the same
weights; sequences without advantage cost nothing and change nothing but the denominator, which is in
their weights; `export` is what `save` and `load` restore.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from openforge.learner.packing import TrainSequence
from openforge.service import BadSettings

if TYPE_CHECKING:
    from torch import Tensor


class BackendRefused(BadSettings):
    """The settings ask for what this backend or this machine does not have."""


class StepStats(msgspec.Struct, frozen=True, kw_only=True):
    """What a step saw. Means are over the loss tokens with an advantage; `forwarded_tokens` counts row tokens.

    `ratio` is pi/mu, `gap` is |log pi - log mu|, `ess` the effective share of the sample, 0..1,
    `entropy_proxy` the mean of -log pi over what was sampled: on policy, the entropy in expectation.
    """

    loss: float = 0.0
    grad_norm: float = 0.0
    learning_rate: float = 0.0
    rows: int = 0
    forwarded_tokens: int = 0
    loss_tokens: int = 0
    ratio_mean: float = 1.0
    ratio_max: float = 1.0
    ratio_capped: float = 0.0
    gap_mean: float = 0.0
    gap_max: float = 0.0
    kl_mean: float = 0.0
    ess: float = 1.0
    entropy_proxy: float = 0.0


class Backend(Protocol):
    """The policy, its optimizer and its random numbers. Calls come one at a time, from one thread."""

    vocabulary: int

    def train(self, sequences: Sequence[TrainSequence], step: int) -> StepStats:
        """One optimizer step; `step` counts from 0 and sets the warm-up."""
        ...

    def logprobs(self, sequences: Sequence[TrainSequence]) -> list[list[float]]:
        """For each sequence the log-probs of its loss tokens, as training computes them."""
        ...

    def export(self) -> Mapping[str, Tensor]:
        """The weights under their checkpoint names, whole, in float32, not to be kept over the next step."""
        ...

    def plain_model(self) -> Any:
        """A whole model of this architecture on the CPU, whose own weights nobody relies on. No collective."""
        ...

    def save(self, folder: Path) -> None:
        """Write weights, optimizer and random numbers into the empty folder, synced."""
        ...

    def load(self, folder: Path) -> None: ...

    def close(self) -> None: ...

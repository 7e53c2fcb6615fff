"""What the learner asks of whatever computes the policy.

Promises of every backend: the same sequences in the same order from the same state give the same
weights; where nothing but the advantage teaches, sequences without one cost nothing and change nothing but the
denominator, which is in their weights; `export` is what `save` and `load` restore.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from openforge.learner.packing import TrainSequence
from openforge.learner.routing import Mixture
from openforge.service import BadSettings

if TYPE_CHECKING:
    from torch import Tensor


class BackendRefused(BadSettings):
    """The settings ask for what this backend or this machine does not have."""


class StepStats(msgspec.Struct, frozen=True, kw_only=True):
    """What a step saw. Means are over the loss tokens with an advantage; `forwarded_tokens` counts row tokens.

    `ratio` is pi/mu, `gap` is |log pi - log mu|, `ess` the effective share of the sample, 0..1,
    `entropy_proxy` the mean of -log pi over what was sampled: on policy, the entropy in expectation. `clipped_low` and
    `clipped_high` are the shares of tokens whose ratio to the centre is outside the clip range, `weight_mean` and
    `weight_zero` the mean correction weight and the share of tokens that have none, `reference_kl` the mean of the KL
    estimate. Of several optimizer steps in one, norms are means, and the rest is what was seen the first time.
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
    clipped_low: float = 0.0
    clipped_high: float = 0.0
    weight_mean: float = 1.0
    weight_zero: float = 0.0
    reference_kl: float = 0.0
    critic_loss: float = 0.0
    critic_grad_norm: float = 0.0
    explained_variance: float = 0.0


class Backend(Protocol):
    """The policy, its optimizer and its random numbers. Calls come one at a time, from one thread.

    `takes` names what it can use beside tokens: `images`. `mixture` is the model's where it replays the experts that
    were recorded (`learner.routing_replay`), else None.
    """

    vocabulary: int
    takes: frozenset[str]
    mixture: Mixture | None

    def train(self, sequences: Sequence[TrainSequence], step: int) -> StepStats:
        """One batch: an optimizer step for each mini-batch and epoch; `step` counts from 0 and sets the warm-up."""
        ...

    def logprobs(self, sequences: Sequence[TrainSequence]) -> list[list[float]]:
        """For each sequence the log-probs of its loss tokens, as training computes them."""
        ...

    def export(self) -> Mapping[str, Tensor]:
        """The weights under the model's own names, whole, in float32, not to be kept over the next step."""
        ...

    def adapters(self) -> Mapping[str, Tensor]:
        """Where low-rank adapters are trained: these alone, whole, in float32, under peft's names."""
        ...

    def plain_model(self) -> Any:
        """A whole model of this architecture on the CPU, with the weights that the run began with where adapters
        are trained; on its own weights otherwise nobody relies. No collective."""
        ...

    def save(self, folder: Path) -> None:
        """Write weights, optimizer and random numbers into the empty folder, synced."""
        ...

    def load(self, folder: Path) -> None: ...

    def close(self) -> None: ...

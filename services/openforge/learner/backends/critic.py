"""PPO's critic: a second model of the policy's architecture that says what reward to expect.

Promises: values, advantages and returns of a batch are computed once, before the first step on it; the critic has its
own weights, optimizer and learning rate, and is saved with the policy. It is a model of its own, not a head on the
policy's trunk, so that neither's gradient disturbs the other; it costs the memory of a second model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from openforge.learner.advantage import WHITENING_EPS, gae
from openforge.learner.backends import ranks
from openforge.learner.backends.forward import ValueForward
from openforge.learner.backends.measured import Measured
from openforge.learner.backends.trained import Trained
from openforge.learner.loss import value_loss
from openforge.learner.packing import Row, TrainSequence
from openforge.runs.config import AlgorithmSection, LearnerSection

Autocast = Callable[[], AbstractContextManager[Any]]


class Critic:
    def __init__(
        self,
        model: Any,
        algorithm: AlgorithmSection,
        settings: LearnerSection,
        device: torch.device,
        autocast: Autocast,
    ) -> None:
        self.trained = Trained(ValueForward(model), settings, settings.critic_learning_rate, device)
        self._algorithm = algorithm
        self._device = device
        self._autocast = autocast
        self.loss = 0.0

    def judged(self, rows: Sequence[Measured], sequences: Sequence[TrainSequence]) -> list[Measured]:
        """The rows with values, advantages and returns by GAE; `sequences` are what the rows were packed of."""
        return [self._judge(measured, sequences) for measured in rows]

    def _judge(self, measured: Measured, sequences: Sequence[TrainSequence]) -> Measured:
        with self._autocast(), torch.no_grad():
            values_N: Tensor = self.trained.network(measured.tensors(self._device)).double()
        advantages, returns = list[float](), list[float]()
        values = values_N.tolist()
        for sequence, start, stop in spans(measured.row):
            advantages_K, returns_K = gae(
                values[start:stop], sequences[sequence].reward, self._algorithm.gamma, self._algorithm.gae_lambda
            )
            advantages += advantages_K
            returns += returns_K
        return measured._replace(
            values_N=values_N.float(), advantages_N=self._tensor(advantages), returns_N=self._tensor(returns)
        )

    def _tensor(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self._device)

    def step(self, rows: Sequence[Measured], step: int) -> float:
        """One optimizer step; the norm of its gradient. `loss` is the critic's loss over this rank's rows."""
        self.loss = 0.0
        return self.trained.step(rows, self._loss, step)

    def _loss(self, measured: Measured) -> Tensor:
        row = measured.tensors(self._device)
        with self._autocast():
            values_N: Tensor = self.trained.network(row)
        losses_N = value_loss(values_N, measured.values_N, measured.returns_N, self._algorithm.value_clip)
        loss = (row.weight_N * losses_N).sum()
        self.loss += measured.share * loss.item()
        return loss


def spans(row: Row) -> Iterator[tuple[int, int, int]]:
    """Each sequence of a row, and where its loss tokens start and stop among the row's."""
    start = 0
    for sequence, slots in itertools.groupby(row.slot_N, key=lambda slot: slot[0]):
        stop = start + sum(1 for _ in slots)
        yield sequence, start, stop
        start = stop


def whitened(parts: Sequence[Sequence[Measured]]) -> list[list[Measured]]:
    """Advantages with mean 0 and variance 1 over all tokens of a batch and all ranks (verl's `masked_whiten`)."""
    own = [row.advantages_N.double() for part in parts for row in part if row.share and row.advantages_N is not None]
    advantages_N = torch.cat([torch.zeros(0, dtype=torch.float64), *(one.cpu() for one in own)])
    count, total = _summed(float(len(advantages_N)), advantages_N.sum().item())
    mean = total / max(count, 1.0)
    (squares,) = _summed((advantages_N - mean).square().sum().item())
    scale = (squares / max(count - 1.0, 1.0) + WHITENING_EPS) ** -0.5
    return [
        [
            row if row.advantages_N is None else row._replace(advantages_N=(row.advantages_N - mean) * scale)
            for row in part
        ]
        for part in parts
    ]


def explained_variance(parts: Sequence[Sequence[Measured]]) -> float:
    """1 - var(return - value) / var(return) over all tokens: 1 is a perfect critic, 0 one that knows the mean."""
    own = [row for part in parts for row in part if row.share and row.returns_N is not None]
    empty = torch.zeros(0, dtype=torch.float64)
    returns_N = torch.cat([empty, *(row.returns_N.double().cpu() for row in own if row.returns_N is not None)])
    values_N = torch.cat([empty, *(row.values_N.double().cpu() for row in own if row.values_N is not None)])
    missed_N = returns_N - values_N
    count, returns, missed, returns_squared, missed_squared = _summed(
        float(len(returns_N)),
        returns_N.sum().item(),
        missed_N.sum().item(),
        returns_N.square().sum().item(),
        missed_N.square().sum().item(),
    )
    if not count:
        return 0.0
    variance = returns_squared / count - (returns / count) ** 2
    left = missed_squared / count - (missed / count) ** 2
    return 1.0 - left / variance if variance > WHITENING_EPS else 0.0


def _summed(*values: float) -> list[float]:
    """Over all ranks."""
    sums = torch.tensor(values, dtype=torch.float64)
    ranks.merge(sums, torch.zeros(1, dtype=torch.float64))
    return list(sums.tolist())

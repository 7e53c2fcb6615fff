"""Sums over loss tokens that can be added over rows and ranks, and what they say at the end."""

from __future__ import annotations

import torch
from torch import Tensor

from openforge.learner.backends.contract import StepStats
from openforge.learner.backends.forward import RowTensors
from openforge.learner.loss import log_ratio

_SUMS = ("tokens", "ratio", "ratio_squared", "capped", "gap", "kl", "entropy", "loss", "row_tokens", "rows")
_MAXIMA = ("ratio", "gap")


class StepSums:
    """Float64 sums and maxima; `merge` adds those of other ranks."""

    def __init__(self) -> None:
        self.sums = torch.zeros(len(_SUMS), dtype=torch.float64)
        self.maxima = torch.zeros(len(_MAXIMA), dtype=torch.float64)

    def add(self, row: RowTensors, logprobs_N: Tensor, loss: Tensor, ratio_cap: float) -> None:
        with torch.no_grad():
            delta_N = log_ratio(logprobs_N, row.mu_logprobs_N).double()
            ratio_N = delta_N.exp()
            sums = [
                torch.tensor(float(len(delta_N)), dtype=torch.float64),
                ratio_N.sum(),
                ratio_N.square().sum(),
                (ratio_N > ratio_cap).sum(),
                delta_N.abs().sum(),
                -delta_N.sum(),
                -logprobs_N.double().sum(),
                loss.double(),
                torch.tensor(float(row.ids_1T.shape[1]), dtype=torch.float64),
                torch.tensor(1.0, dtype=torch.float64),
            ]
            self.sums += torch.stack([value.to("cpu", torch.float64) for value in sums])
            maxima = torch.stack([ratio_N.max(), delta_N.abs().max()]).cpu()
            self.maxima = torch.maximum(self.maxima, maxima)

    def stats(self, *, grad_norm: float, learning_rate: float) -> StepStats:
        total = dict(zip(_SUMS, self.sums.tolist(), strict=True))
        highest = dict(zip(_MAXIMA, self.maxima.tolist(), strict=True))
        tokens = total["tokens"]
        if not tokens:
            return StepStats(grad_norm=grad_norm, learning_rate=learning_rate)
        return StepStats(
            loss=total["loss"],
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            rows=int(total["rows"]),
            forwarded_tokens=int(total["row_tokens"]),
            loss_tokens=int(tokens),
            ratio_mean=total["ratio"] / tokens,
            ratio_max=highest["ratio"],
            ratio_capped=total["capped"] / tokens,
            gap_mean=total["gap"] / tokens,
            gap_max=highest["gap"],
            kl_mean=total["kl"] / tokens,
            ess=total["ratio"] ** 2 / (tokens * total["ratio_squared"]),
            entropy_proxy=total["entropy"] / tokens,
        )

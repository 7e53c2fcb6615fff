"""The default backend: plain torch, float32 master weights, AdamW; one process or FSDP2 over many.

Promises: world sizes give the same step up to the order of sums; a checkpoint of one world size loads in
another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openforge.learner.backends import ranks, storage
from openforge.learner.backends.contract import BackendRefused, StepStats
from openforge.learner.backends.forward import PolicyForward, RowTensors
from openforge.learner.backends.options import TorchOptions, torch_options
from openforge.learner.backends.stats import StepSums
from openforge.learner.loss import ppo_clip, reinforce_is
from openforge.learner.packing import Row, TrainSequence, pack
from openforge.runs import RunConfig
from openforge.runs.config import LearnerSection

FILL_TOKENS_CPU = 128


class TorchBackend:
    """One rank's share. Every public method is a collective: all ranks call it, in the same order."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.settings = config.learner
        self.options = torch_options(config.learner.backend_options)
        self.device = _device(self.options)
        torch.set_num_threads(self.settings.threads)
        torch.manual_seed(config.run.seed)
        model = _load(config.model.path, self.options)
        self.vocabulary: int = model.config.vocab_size
        model.to(self.device)
        self.policy = PolicyForward(model)
        self._plain: Any = None
        ranks.shard(self.policy, self.device)
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(),
            lr=self.settings.learning_rate,
            betas=self.settings.betas,
            weight_decay=self.settings.weight_decay,
            fused=True,
        )

    def train(self, sequences: Sequence[TrainSequence], step: int) -> StepStats:
        rows = self._rows([one for one in sequences if one.advantage != 0.0])
        self._zero_gradients()
        sums = StepSums()
        with self._autocast():
            for last, row, weight in _marked_last(ranks.share(rows)):
                ranks.reduce_gradients(self.policy, last)
                self._accumulate(row, weight, sums)
        ranks.merge(sums.sums, sums.maxima)
        return sums.stats(grad_norm=self._update(step), learning_rate=self._learning_rate(step))

    def logprobs(self, sequences: Sequence[TrainSequence]) -> list[list[float]]:
        found = [[0.0] * len(one.at_K) for one in sequences]
        with self._autocast(), torch.no_grad():
            for row in self._rows(sequences):
                for (index, offset), value in zip(
                    row.slot_N, self.policy(RowTensors.of(row, self.device)).tolist(), strict=True
                ):
                    found[index][offset] = value
        return found

    def export(self) -> Mapping[str, Tensor]:
        prefix = "model."
        return {
            name.removeprefix(prefix): ranks.whole(parameter.detach()).to("cpu")
            for name, parameter in self.policy.named_parameters()
        }

    def plain_model(self) -> Any:
        if ranks.world() == 1 and self.device.type == "cpu":
            return self.policy.model
        if self._plain is None:
            self._plain = _load(self.config.model.path, TorchOptions())
        return self._plain

    def save(self, folder: Path) -> None:
        storage.save(folder, self.policy, self.optimizer)

    def load(self, folder: Path) -> None:
        storage.load(folder, self.policy, self.optimizer)

    def close(self) -> None:
        """Nothing is held but memory."""

    def _rows(self, sequences: Sequence[TrainSequence]) -> list[Row]:
        automatic = FILL_TOKENS_CPU if self.device.type == "cpu" else self.settings.row_tokens
        return pack(sequences, self.settings.row_tokens, self.options.fill_tokens or automatic)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.settings.autocast == "none":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)  # type: ignore[no-any-return]

    def _accumulate(self, row: Row, weight: float, sums: StepSums) -> None:
        """Forward and backward of one row. `weight` is 0 for a row that only keeps the ranks in step."""
        tensors = RowTensors.of(row, self.device)
        logprobs_N: Tensor = self.policy(tensors)
        with torch.autocast(self.device.type, enabled=False):
            loss = (tensors.weight_N * self._loss(logprobs_N, tensors)).sum()
            (loss * (weight * ranks.world())).backward()
        if weight:
            sums.add(tensors, logprobs_N, loss.detach(), self._ratio_limit())

    def _loss(self, logprobs_N: Tensor, row: RowTensors) -> Tensor:
        algorithm = self.config.algorithm
        match algorithm.loss:
            case "reinforce_is":
                return reinforce_is(logprobs_N, row.mu_logprobs_N, row.advantage_N, algorithm.ratio_cap)
            case "ppo_clip":
                return ppo_clip(logprobs_N, row.mu_logprobs_N, row.advantage_N, algorithm.clip_low, algorithm.clip_high)

    def _ratio_limit(self) -> float:
        algorithm = self.config.algorithm
        return algorithm.ratio_cap if algorithm.loss == "reinforce_is" else 1.0 + algorithm.clip_high

    def _zero_gradients(self) -> None:
        """To zero, not to None: without a single row the step is still one with zero gradient."""
        for parameter in self.policy.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.zero_()

    def _update(self, step: int) -> float:
        limit = self.settings.gradient_clip or float("inf")
        norm = ranks.whole(torch.nn.utils.clip_grad_norm_(self.policy.parameters(), limit)).item()
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate(step)
        self.optimizer.step()
        return float(norm)

    def _learning_rate(self, step: int) -> float:
        return learning_rate(self.settings, step)


def learning_rate(settings: LearnerSection, step: int) -> float:
    """Up over `warmup_steps`, then down so that step `decay_steps` would have none; steps count from 0."""
    warmup, horizon = settings.warmup_steps, settings.decay_steps
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    if not horizon:
        return settings.learning_rate
    return settings.learning_rate * max(0.0, (horizon - step) / max(1, horizon - warmup))


def _device(options: TorchOptions) -> torch.device:
    if options.device == "cuda" and not torch.cuda.is_available():
        raise BackendRefused("learner.backend_options.device = 'cuda': torch sees no CUDA device here; use 'cpu'.")
    if options.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", ranks.local_rank())


def _load(path: str, options: TorchOptions) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    model.config.use_cache = False
    if options.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def _marked_last(shares: Sequence[tuple[Row, float]]) -> Iterator[tuple[bool, Row, float]]:
    for index, (row, weight) in enumerate(shares):
        yield index == len(shares) - 1, row, weight

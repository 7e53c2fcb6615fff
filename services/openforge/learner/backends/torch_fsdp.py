"""The default backend: plain torch, float32 master weights, AdamW; one process or FSDP2 over many.

Promises: world sizes give the same step up to the order of sums; a checkpoint of one world size loads in
another; what a loss compares with (the learner's own log-probs, the reference's, the critic's values) is computed once
for a batch, before its first optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openforge.learner.backends import critic, kernels, loading, lora, ranks, replay, storage
from openforge.learner.backends.contract import BackendRefused, StepStats
from openforge.learner.backends.critic import Critic
from openforge.learner.backends.forward import PolicyForward, RowTensors
from openforge.learner.backends.measured import Measured
from openforge.learner.backends.options import TorchOptions, torch_options
from openforge.learner.backends.stats import StepSums
from openforge.learner.backends.trained import Trained, learning_rate
from openforge.learner.objective import needs_proximal, needs_reference, teaches_without_advantage, token_losses
from openforge.learner.packing import Row, TrainSequence, pack
from openforge.runs import RunConfig

FILL_TOKENS_CPU = 512
"""Longer rows are no faster there, and take memory for their activations."""


class TorchBackend:
    """One rank's share. Every public method is a collective: all ranks call it, in the same order."""

    takes: frozenset[str] = frozenset()

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.settings = config.learner
        self.algorithm = config.algorithm
        self.options = torch_options(config.learner.backend_options)
        self.device = _device(self.options)
        torch.set_num_threads(self.settings.threads)
        torch.manual_seed(config.run.seed)
        model = self._model()
        self.vocabulary: int = model.config.vocab_size
        self.mixture = replay.equip(model) if self.settings.routing_replay else None
        if self.settings.lora.rank:
            lora.equip(model, self.settings.lora)
        self.trained = Trained(PolicyForward(model), self.settings, self.settings.learning_rate, self.device)
        self._reference = self._first_policy() if needs_reference(self.algorithm) else None
        self._critic: Critic | None = None
        if self.algorithm.advantage == "gae":
            self._critic = Critic(self._model(), self.algorithm, self.settings, self.device, self._autocast)
        self._plain: Any = None

    @property
    def policy(self) -> Any:
        return self.trained.network

    def train(self, sequences: Sequence[TrainSequence], step: int) -> StepStats:
        everyone = teaches_without_advantage(self.algorithm)
        teaching = [one for one in sequences if everyone or one.advantage != 0.0]
        parts = [
            self._measured([one for one in teaching if one.part == part]) for part in range(self.algorithm.mini_batches)
        ]
        if self._critic is not None:
            parts = critic.whitened(parts)
        sums, norms, critic_norms, critic_losses = StepSums(self.algorithm), list[float](), list[float](), list[float]()
        for epoch in range(self.algorithm.epochs):
            for rows in parts:
                norms.append(self.trained.step(rows, self._loss_into(sums if epoch == 0 else None), step))
                if self._critic is not None:
                    critic_norms.append(self._critic.step(rows, step))
                    critic_losses.append(self._critic.loss)
        sums.add_critic(critic_losses)
        ranks.merge(sums.sums, sums.maxima)
        return sums.stats(
            grad_norm=sum(norms) / len(norms),
            learning_rate=learning_rate(self.settings, self.settings.learning_rate, step),
            critic_grad_norm=sum(critic_norms) / max(1, len(critic_norms)),
            explained_variance=critic.explained_variance(parts) if self._critic is not None else 0.0,
        )

    def logprobs(self, sequences: Sequence[TrainSequence]) -> list[list[float]]:
        found = [[0.0] * len(one.at_K) for one in sequences]
        for row in self._rows(sequences):
            logprobs_N = self._forwarded(self.policy, RowTensors.of(row, self.device))
            for (index, offset), value in zip(row.slot_N, logprobs_N.tolist(), strict=True):
                found[index][offset] = value
        return found

    def export(self) -> Mapping[str, Tensor]:
        parameters = self._parameters()
        if self.settings.lora.rank:
            return lora.merged(parameters, self.settings.lora)
        return {name: ranks.whole(parameter.detach()).to("cpu") for name, parameter in parameters.items()}

    def adapters(self) -> Mapping[str, Tensor]:
        return lora.alone(self._parameters())

    def plain_model(self) -> Any:
        if ranks.world() == 1 and self.device.type == "cpu" and not self.settings.lora.rank:
            return self.policy.model
        if self._plain is None:
            self._plain = loading.load_plain(self.config.model.path)
        return self._plain

    def save(self, folder: Path) -> None:
        storage.save(folder, self._stored())

    def load(self, folder: Path) -> None:
        storage.load(folder, self._stored())

    def close(self) -> None:
        """Nothing is held but memory."""

    def _model(self) -> Any:
        model = loading.load_plain(self.config.model.path, self.options.recompute).to(self.device)
        if self.options.liger:
            kernels.equip(model, self.device)
        return model

    def _first_policy(self) -> Any:
        """The run's first weights: under adapters they are still there, otherwise they are a model of their own."""
        if self.settings.lora.rank:
            return self.policy
        reference = PolicyForward(self._model().requires_grad_(False))
        ranks.shard(reference, self.device)
        return reference

    def _parameters(self) -> dict[str, Tensor]:
        return {name.removeprefix("model."): value for name, value in self.policy.named_parameters()}

    def _stored(self) -> dict[str, Trained]:
        return {"": self.trained} if self._critic is None else {"": self.trained, "critic_": self._critic.trained}

    def _rows(self, sequences: Sequence[TrainSequence]) -> list[Row]:
        automatic = FILL_TOKENS_CPU if self.device.type == "cpu" else self.settings.row_tokens
        return pack(sequences, self.settings.row_tokens, self.options.fill_tokens or automatic, ranks.world())

    def _measured(self, sequences: Sequence[TrainSequence]) -> list[Measured]:
        """This rank's rows of a mini-batch, with all that has to be known before the first step."""
        rows = [self._compared(Measured(row, share)) for row, share in self._share(self._rows(sequences))]
        return rows if self._critic is None else self._critic.judged(rows, sequences)

    def _share(self, rows: Sequence[Row]) -> list[tuple[Row, float]]:
        return ranks.share(rows, ranks.rank(), ranks.world()) if self.mixture is None else ranks.with_routing(rows)

    def _compared(self, measured: Measured) -> Measured:
        if needs_proximal(self.algorithm):
            proximal_N = self._forwarded(self.policy, measured.tensors(self.device))
            measured = measured._replace(proximal_N=proximal_N)
        if self._reference is not None:
            with lora.without(self._reference.model):
                reference_N = self._forwarded(self._reference, measured.tensors(self.device).by_own_choice())
            measured = measured._replace(reference_N=reference_N)
        return measured

    def _forwarded(self, network: Any, row: RowTensors) -> Tensor:
        with self._autocast(), torch.no_grad():
            logprobs_N: Tensor = network(row)
        return logprobs_N

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.settings.autocast == "none":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)  # type: ignore[no-any-return]

    def _loss_into(self, sums: StepSums | None) -> Callable[[Measured], Tensor]:
        """The policy's loss of a row, counted in `sums` where there are any."""

        def loss_of(measured: Measured) -> Tensor:
            row = measured.tensors(self.device)
            with self._autocast():
                logprobs_N: Tensor = self.policy(row)
            tokens = measured.tokens(row, logprobs_N)
            loss = (row.weight_N * token_losses(self.algorithm, tokens)).sum()
            if measured.share and sums is not None:
                sums.add(row.ids_1T.shape[1], tokens, loss.detach())
            return loss

        return loss_of


def _device(options: TorchOptions) -> torch.device:
    if options.device == "cuda" and not torch.cuda.is_available():
        raise BackendRefused("learner.backend_options.device = 'cuda': torch sees no CUDA device here; use 'cpu'.")
    if options.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", ranks.local_rank())

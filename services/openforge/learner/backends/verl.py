"""The policy in verl's engines: FSDP and Megatron, with the learner's own loss.

Promises: a step is the torch backend's step, up to rounding; every rank calls every method. Sequences are forwarded one
by one, not in prefix-sharing rows: that is the price of tensor, pipeline, context and expert parallelism. Checkpoints
of the FSDP engine are the torch backend's, for any number of ranks; those of the Megatron engine are verl's own, which
load on as many ranks as wrote them, with the whole policy beside them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from openforge.learner.backends import loading, ranks, storage, verl_engine
from openforge.learner.backends.contract import BackendRefused, StepStats
from openforge.learner.backends.options import verl_options
from openforge.learner.backends.stats import StepSums
from openforge.learner.backends.trained import learning_rate
from openforge.learner.backends.verl_engine import Engine, Sample, told_tokens
from openforge.learner.objective import (
    LossTokens,
    needs_proximal,
    needs_reference,
    teaches_without_advantage,
    token_losses,
)
from openforge.learner.packing import TrainSequence
from openforge.learner.routing import Mixture, Routing
from openforge.runs import RunConfig
from openforge.runs.config import AlgorithmSection

MARK = "verl.json"

NOTHING = TrainSequence(ids_T=[0, 0], at_K=[1], mu_logprobs_K=[0.0], advantage=0.0, weight=0.0, temperature=1.0)
"""What a rank forwards that has nothing to forward."""


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """Who wrote a checkpoint in verl's own files."""

    verl: str
    ranks: int


class VerlBackend:
    """One rank's share. Every public method is a collective: all ranks call it, in the same order."""

    takes: frozenset[str] = frozenset()

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.settings = config.learner
        self.algorithm = config.algorithm
        self.options = verl_options(config.learner.backend_options)
        on_cpu = not torch.cuda.is_available()
        torch.set_num_threads(self.settings.threads)
        torch.manual_seed(config.run.seed)
        if not on_cpu:
            torch.cuda.set_device(ranks.local_rank())
        self._on_cpu = on_cpu
        self._engine = self._made(replays=self.settings.routing_replay)
        self.mixture: Mixture | None = self._engine.mixture
        self._copy_R = self._copies() if self.mixture is not None else []
        self._reference = self._made(replays=False) if needs_reference(self.algorithm) else None
        self._names = loading.parameter_names(config.model.path)
        self._plain: Any = None
        self.vocabulary = int(self._engine.model_config.hf_config.get_text_config().vocab_size)

    def train(self, sequences: Sequence[TrainSequence], step: int) -> StepStats:
        everyone = teaches_without_advantage(self.algorithm)
        teaching = [one for one in sequences if everyone or one.advantage != 0.0]
        parts = [
            self._samples([one for one in teaching if one.part == part]) for part in range(self.algorithm.mini_batches)
        ]
        rate = learning_rate(self.settings, self.settings.learning_rate, step)
        sums, norms = StepSums(self.algorithm), list[float]()
        for epoch in range(self.algorithm.epochs):
            for samples in parts:
                loss = RowLoss(self.algorithm, self._engine.copies, sums if epoch == 0 else None)
                norms.append(self._engine.step(samples, loss, rate))
        if not self._engine.tells:
            sums = StepSums(self.algorithm)
        ranks.merge(sums.sums, sums.maxima)
        return sums.stats(grad_norm=sum(norms) / len(norms), learning_rate=rate)

    def logprobs(self, sequences: Sequence[TrainSequence]) -> list[list[float]]:
        return self._logprobs(self._engine, sequences, self._share(sequences))

    def export(self) -> Mapping[str, Tensor]:
        return {name: parameter.to(torch.float32) for name, parameter in self._told().items()}

    def adapters(self) -> Mapping[str, Tensor]:
        return {}  # a run with any is refused

    def plain_model(self) -> Any:
        if self._plain is None:
            self._plain = loading.load_plain(self.config.model.path)
        return self._plain

    def save(self, folder: Path) -> None:
        if (sharded := self._engine.sharded()) is not None:
            storage.save(folder, {"": sharded})
            return
        policy = self._told()
        self._engine.save(folder)
        if ranks.rank() == 0:
            storage.save_whole(folder, policy)
            (folder / MARK).write_bytes(msgspec.json.encode(Mark(verl=verl_engine.VERSION, ranks=ranks.world())))
        dist.barrier()
        _sync(folder)
        dist.barrier()

    def load(self, folder: Path) -> None:
        if (sharded := self._engine.sharded()) is not None:
            storage.load(folder, {"": sharded})
            return
        self._expect(folder)
        self._engine.load(folder)

    def close(self) -> None:
        """Nothing is held but memory."""

    def _told(self) -> dict[str, Tensor]:
        """The policy's parameters under the model's own names, whole, on the CPU."""
        found = {name: parameter.detach().to("cpu") for name, parameter in self._engine.parameters()}
        if self._names - found.keys():
            found = loading.as_computed(self.config.model.path, found)
        return {name: found[name] for name in self._names}

    def _expect(self, folder: Path) -> None:
        """Raises `BackendRefused` where the checkpoint is whole but not for these ranks."""
        written = msgspec.json.decode((folder / MARK).read_bytes(), type=Mark)
        own = Mark(verl=verl_engine.VERSION, ranks=ranks.world())
        if written == own:
            return
        run = self.config.run.name
        raise BackendRefused(
            f"the checkpoint {folder} is of verl {written.verl} on {written.ranks} ranks, and this learner is verl "
            f"{own.verl} on {own.ranks}: checkpoints of verl's Megatron engine load only as they were written. Set "
            f"learner.world_size = {written.ranks}, or take its weights with `openforge checkpoint export {run} OUT` "
            "and begin a run of another name with model.path = OUT."
        )

    def _made(self, replays: bool) -> Engine:
        path, seed = self.config.model.path, self.config.run.seed
        return Engine(path, self.settings, self.options, on_cpu=self._on_cpu, seed=seed, replays=replays)

    def _copies(self) -> list[int]:
        """For each rank the copy of the model that it is of: all ranks of one copy compute the same samples."""
        found = [0] * ranks.world()
        dist.all_gather_object(found, self._engine.copy)
        return found

    def _samples(self, sequences: Sequence[TrainSequence]) -> list[Sample]:
        """This rank's share of a mini-batch, with all that has to be known before the first step."""
        own = self._share(sequences)
        proximal = self._logprobs(self._engine, sequences, own) if needs_proximal(self.algorithm) else None
        reference = self._logprobs(self._reference, sequences, own) if self._reference is not None else None
        known = {
            name: values for name, values in (("proximal", proximal), ("reference", reference)) if values is not None
        }
        return [
            _sample(sequences[one.number], {name: values[one.number] for name, values in known.items()}, one)
            for one in own
        ] or [_sample(NOTHING, {name: [0.0] for name in known}, _NOBODYS)]

    def _share(self, sequences: Sequence[TrainSequence]) -> list[_Own]:
        """Which sequences are this rank's: as many on each, some of them forwarded for company with weight 0."""
        numbered = [_Numbered(index, one.ids_T, one.routing) for index, one in enumerate(sequences) if one.at_K]
        own = ranks.share(numbered, self._engine.copy, self._engine.copies)
        routings = [None] * len(own) if self.mixture is None else ranks.dealt(numbered, self._copy_R)
        return [_Own(one.number, share, routing) for (one, share), routing in zip(own, routings, strict=True)]

    def _logprobs(self, engine: Engine, sequences: Sequence[TrainSequence], own: Sequence[_Own]) -> list[list[float]]:
        """Known on every rank."""
        samples = [_sample(sequences[one.number], {}, one) for one in own] or [_sample(NOTHING, {}, _NOBODYS)]
        told = engine.logprobs(samples)
        mine = {one.number: values for one, values in zip(own, told, strict=False) if one.share}
        gathered: list[dict[int, list[float]]] = [{} for _ in range(ranks.world())]
        dist.all_gather_object(gathered, mine)
        everyone = {index: values for part in gathered for index, values in part.items()}
        return [everyone.get(index, []) for index in range(len(sequences))]


class RowLoss:
    """The loss of a micro-batch as an engine asks for it; counted in `sums` where there are any."""

    def __init__(self, algorithm: AlgorithmSection, copies: int, sums: StepSums | None) -> None:
        self._algorithm = algorithm
        self._copies = copies
        self._sums = sums

    def __call__(
        self, model_output: Mapping[str, Tensor], data: Mapping[str, Any], dp_group: Any = None
    ) -> tuple[Tensor, dict[str, Any]]:
        logprobs_N, sequence_N, columns = told_tokens(model_output, data)
        tokens = LossTokens(
            logprobs_N=logprobs_N.float(),
            mu_logprobs_N=columns["mu"],
            advantages_N=columns["advantage"],
            sequence_N=sequence_N,
            proximal_N=columns.get("proximal"),
            reference_N=columns.get("reference"),
        )
        loss = (columns["weight"] * token_losses(self._algorithm, tokens)).sum()
        if self._sums is not None and len(sequence_N):
            self._sums.add(data["input_ids"].values().numel(), tokens, loss.detach())
        return loss * self._copies, {}


class _Numbered(NamedTuple):
    number: int
    ids_T: list[int]
    routing: Routing | None


class _Own(NamedTuple):
    """A sequence of this rank's, and the experts that it was sampled through; of `share` 0 it is for company."""

    number: int
    share: float
    routing: Routing | None


_NOBODYS = _Own(0, 0.0, None)


def _sample(sequence: TrainSequence, known: Mapping[str, Sequence[float]], own: _Own) -> Sample:
    """Up to the last token that is trained; place t predicts token t+1. Of share 0 nothing is trained."""
    length = sequence.at_K[-1] + 1
    places = [position - 1 for position in sequence.at_K] if own.share else []
    trained_T = [False] * length
    for place in places:
        trained_T[place] = True
    values = {
        "mu": sequence.mu_logprobs_K,
        "advantage": [sequence.advantage] * len(sequence.at_K),
        "weight": [sequence.weight] * len(sequence.at_K),
        **known,
    }
    columns = {name: _spread(values_K, places, length) for name, values_K in values.items()}
    return Sample(sequence.ids_T[:length], trained_T, sequence.temperature, columns, own.routing)


def _spread(values_K: Sequence[float], places: Sequence[int], length: int) -> list[float]:
    spread = [0.0] * length
    for place, value in zip(places, values_K, strict=False):
        spread[place] = value
    return spread


def refuse(config: RunConfig) -> None:
    """Raises `BackendRefused` for what this backend or this machine does not have."""
    learner, engine = config.learner, verl_options(config.learner.backend_options).engine
    if learner.lora.rank:
        raise BackendRefused(
            f"learner.lora.rank = {learner.lora.rank}: the verl backend trains whole weights; write rank = 0, or "
            "learner.backend = 'torch'."
        )
    if config.algorithm.advantage == "gae":
        raise BackendRefused(
            "algorithm.advantage = 'gae': the verl backend has no critic; take another advantage, or "
            "learner.backend = 'torch'."
        )
    if learner.routing_replay and engine == "fsdp":
        raise BackendRefused(
            "learner.routing_replay = true: verl's FSDP engine replays nothing; write false, engine = 'megatron' in "
            "learner.backend_options, or learner.backend = 'torch'."
        )
    if engine == "megatron" and not torch.cuda.is_available():
        raise BackendRefused(
            "learner.backend_options.engine = 'megatron' needs CUDA devices, and torch sees none here; use 'fsdp'."
        )
    if engine == "megatron" and learner.autocast == "none":
        raise BackendRefused(
            "learner.autocast = 'none': verl's Megatron engine computes in bfloat16; write learner.autocast = "
            "'bfloat16'."
        )
    verl_engine.require_verl()


def _sync(folder: Path) -> None:
    """What verl wrote is on disk: it does not see to that itself."""
    for path in sorted(folder.rglob("*")):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

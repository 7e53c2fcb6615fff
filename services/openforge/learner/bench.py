"""One training step on a given batch: `python -m openforge.learner.bench --model FOLDER --batch FILE --way rows`.

`rows` is how the learner trains. `padded` is a plain loop over transformers: eight sequences a micro-batch in the order
of the batch, padded to the longest of them, all logits. Both compute the same loss of the same batch and print one
JSON object. Of several steps the time is the median.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from openforge.learner.backends import loading
from openforge.learner.backends.choose import backend_for
from openforge.learner.objective import LossTokens, token_losses
from openforge.learner.packing import TrainSequence
from openforge.runs import RunConfig
from openforge.runs.config import AlgorithmSection, EnvironmentSection, LearnerSection, ModelSection, RunSection

MICRO_BATCH = 8
ROW_TOKENS = 2048
LEARNING_RATE = 1e-9
"""The optimizer works as ever, and every way starts from the same weights."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    forwarded_tokens: int
    loss: float
    grad_norm: float


class Measured(Step, frozen=True, kw_only=True):
    """`cpu_s` is the CPU time of a step in this process, which other work on the machine disturbs least."""

    step_s: float
    cpu_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a checkpoint folder")
    parser.add_argument("--batch", type=Path, required=True, help="a JSON list of sequences to train")
    parser.add_argument("--way", choices=("rows", "padded"), default="rows")
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--ranks", type=int, default=1, help="of `rows`")
    parser.add_argument("--steps", type=int, default=1)
    asked = parser.parse_args()
    config = settings(asked.model, asked.threads, asked.ranks)
    sequences = msgspec.json.decode(asked.batch.read_bytes(), type=list[TrainSequence])
    measured = (in_rows if asked.way == "rows" else padded)(config, sequences, asked.steps)
    sys.stdout.write(msgspec.json.encode(measured).decode() + "\n")


def settings(model: str, threads: int, ranks: int) -> RunConfig:
    return RunConfig(
        run=RunSection(name="bench", steps=1),
        model=ModelSection(path=model),
        environment=EnvironmentSection(name="bench", harness="none"),
        algorithm=AlgorithmSection(loss="ppo_clip"),
        learner=LearnerSection(
            threads=threads, world_size=ranks, row_tokens=ROW_TOKENS, learning_rate=LEARNING_RATE, gradient_clip=1.0
        ),
    )


def in_rows(config: RunConfig, sequences: Sequence[TrainSequence], steps: int = 1) -> Measured:
    backend = backend_for(config)
    backend.train(sequences[: 2 * config.learner.world_size], 0)

    def step() -> Step:
        stats = backend.train(sequences, 0)
        return Step(forwarded_tokens=stats.forwarded_tokens, loss=stats.loss, grad_norm=stats.grad_norm)

    measured = _timed(step, steps)
    backend.close()
    return measured


def padded(config: RunConfig, sequences: Sequence[TrainSequence], steps: int = 1) -> Measured:
    torch.set_num_threads(config.learner.threads)
    model = loading.load_plain(config.model.path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    _padded_loss(model, sequences[:2], config.algorithm)[0].backward()

    def step() -> Step:
        optimizer.zero_grad()
        total, forwarded = 0.0, 0
        for part in _micro_batches(sequences):
            loss, tokens = _padded_loss(model, part, config.algorithm)
            loss.backward()
            total, forwarded = total + loss.item(), forwarded + tokens
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.learner.gradient_clip)
        optimizer.step()
        return Step(forwarded_tokens=forwarded, loss=total, grad_norm=norm.item())

    return _timed(step, steps)


def _timed(step: Callable[[], Step], steps: int) -> Measured:
    """What the last step gave: the weights hardly move."""
    wall, cpu = list[float](), list[float]()
    for _ in range(steps):
        began, began_cpu = time.perf_counter(), time.process_time()
        found = step()
        wall.append(time.perf_counter() - began)
        cpu.append(time.process_time() - began_cpu)
    return Measured(step_s=statistics.median(wall), cpu_s=statistics.median(cpu), **msgspec.structs.asdict(found))


def _micro_batches(sequences: Sequence[TrainSequence]) -> Iterator[Sequence[TrainSequence]]:
    for start in range(0, len(sequences), MICRO_BATCH):
        yield sequences[start : start + MICRO_BATCH]


def _padded_loss(model: Any, part: Sequence[TrainSequence], algorithm: AlgorithmSection) -> tuple[Tensor, int]:
    longest = max(len(one.ids_T) for one in part)
    ids_BT = torch.tensor([one.ids_T + [0] * (longest - len(one.ids_T)) for one in part])
    real_BT = torch.tensor([[1] * len(one.ids_T) + [0] * (longest - len(one.ids_T)) for one in part])
    logits_BTV = model(input_ids=ids_BT, attention_mask=real_BT, use_cache=False).logits[:, :-1]
    logprobs_BT = logits_BTV.log_softmax(-1).gather(-1, ids_BT[:, 1:, None])[..., 0]
    sequence_N = torch.tensor([index for index, one in enumerate(part) for _ in one.at_K])
    at_N = torch.tensor([at - 1 for one in part for at in one.at_K])
    tokens = LossTokens(
        logprobs_N=logprobs_BT[sequence_N, at_N],
        mu_logprobs_N=torch.tensor([value for one in part for value in one.mu_logprobs_K]),
        advantages_N=torch.tensor([one.advantage for one in part])[sequence_N],
        sequence_N=sequence_N,
    )
    weight_N = torch.tensor([one.weight for one in part])[sequence_N]
    return (weight_N * token_losses(algorithm, tokens)).sum(), len(part) * longest


if __name__ == "__main__":
    main()

"""One training step, two ways: `python -m openforge.learner.bench --model FOLDER --threads 1`.

`rows` is how the learner trains: prefix-sharing rows. `padded` is the usual way: one sequence a row, padded to
the longest, eight rows a micro-batch. Both compute the same loss of the same batch, with the head on loss
tokens only. The batch is shaped like the demo's: groups whose prompts have most of their tokens in common.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from typing import Any

import msgspec
import torch
from torch import Tensor

from openforge.learner.aggregation import token_weights
from openforge.learner.backends.torch_fsdp import TorchBackend
from openforge.learner.loss import reinforce, token_tis
from openforge.learner.packing import TrainSequence
from openforge.runs import RunConfig
from openforge.runs.config import EnvironmentSection, LearnerSection, ModelSection, RunSection

HEAD, PROMPT, ANSWER, MEMBERS, MICRO_BATCH = 225, 15, 20, 8, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a checkpoint folder")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--groups", type=int, default=2)
    asked = parser.parse_args()
    sys.stdout.write(msgspec.json.encode(measure(asked.model, asked.threads, asked.groups)).decode() + "\n")


def measure(model: str, threads: int, groups: int) -> dict[str, Any]:
    config = RunConfig(
        run=RunSection(name="bench", steps=1),
        model=ModelSection(path=model),
        environment=EnvironmentSection(name="bench", harness="none"),
        learner=LearnerSection(threads=threads),
    )
    backend = TorchBackend(config)
    sequences = made_up(backend.vocabulary, groups)
    backend.train(sequences[:2], 0)
    began = time.perf_counter()
    stats = backend.train(sequences, 0)
    rows_s = time.perf_counter() - began
    began = time.perf_counter()
    padded_tokens = padded_step(backend, sequences)
    padded_s = time.perf_counter() - began
    tokens = sum(len(one.ids_T) for one in sequences)
    return {
        "threads": threads,
        "sequences": len(sequences),
        "sequence_tokens": tokens,
        "loss_tokens": stats.loss_tokens,
        "rows": _rates(rows_s, stats.forwarded_tokens, tokens, stats.loss_tokens),
        "padded": _rates(padded_s, padded_tokens, tokens, stats.loss_tokens),
        "speedup": padded_s / rows_s,
    }


def _rates(step_s: float, forwarded: int, sequence_tokens: int, loss_tokens: int) -> dict[str, float]:
    return {
        "step_s": step_s,
        "forwarded_tokens": forwarded,
        "forwarded_tokens_per_s": forwarded / step_s,
        "trained_tokens_per_s": sequence_tokens / step_s,
        "loss_tokens_per_s": loss_tokens / step_s,
    }


def made_up(vocabulary: int, groups: int) -> list[TrainSequence]:
    """The same numbers give the same batch."""
    rng = random.Random(0)
    head = _ids(rng, HEAD, vocabulary)
    prompts = [[*head, *_ids(rng, PROMPT, vocabulary)] for _ in range(groups)]
    answers = [
        (prompt, _ids(rng, rng.randint(ANSWER - 8, ANSWER + 8), vocabulary))
        for prompt in prompts
        for _ in range(MEMBERS)
    ]
    weights = token_weights([len(answer) for _, answer in answers], range(len(answers)), "token_mean")
    return [
        TrainSequence(
            ids_T=[*prompt, *answer],
            at_K=list(range(len(prompt), len(prompt) + len(answer))),
            mu_logprobs_K=[-rng.uniform(1, 8) for _ in answer],
            advantage=rng.choice((-1.0, 1.0)),
            weight=weight,
            temperature=0.7,
        )
        for (prompt, answer), weight in zip(answers, weights, strict=True)
    ]


def _ids(rng: random.Random, count: int, vocabulary: int) -> list[int]:
    return [rng.randrange(3, vocabulary) for _ in range(count)]


def padded_step(backend: TorchBackend, sequences: list[TrainSequence]) -> int:
    """The step that the rows replace; the tokens that it computes."""
    backend.trained.optimizer.zero_grad()
    computed = 0
    for start in range(0, len(sequences), MICRO_BATCH):
        part = sequences[start : start + MICRO_BATCH]
        loss, tokens = _padded_loss(backend.policy.model, part)
        loss.backward()
        computed += tokens
    torch.nn.utils.clip_grad_norm_(backend.policy.parameters(), 1.0)
    backend.trained.optimizer.step()
    return computed


def _padded_loss(model: Any, part: list[TrainSequence]) -> tuple[Tensor, int]:
    longest = max(len(one.ids_T) for one in part)
    ids_BT = torch.tensor([one.ids_T + [0] * (longest - len(one.ids_T)) for one in part])
    hidden_BTD = model.get_decoder()(input_ids=ids_BT, use_cache=False).last_hidden_state
    row_N = torch.tensor([row for row, one in enumerate(part) for _ in one.at_K])
    at_N = torch.tensor([at - 1 for one in part for at in one.at_K])
    target_N = torch.tensor([one.ids_T[at] for one in part for at in one.at_K])
    logits_NV = model.get_output_embeddings()(hidden_BTD[row_N, at_N]) / part[0].temperature
    logprobs_N = logits_NV.log_softmax(-1).gather(1, target_N[:, None])[:, 0]
    mu_N = torch.tensor([value for one in part for value in one.mu_logprobs_K])
    advantage_N = torch.tensor([one.advantage for one in part for _ in one.at_K])
    weight_N = torch.tensor([one.weight for one in part for _ in one.at_K])
    return (weight_N * reinforce(logprobs_N, advantage_N, token_tis(logprobs_N - mu_N, 2.0))).sum(), len(part) * longest


if __name__ == "__main__":
    main()

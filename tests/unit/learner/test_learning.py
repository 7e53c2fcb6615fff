"""The whole step on a bandit: what earns more becomes more likely."""

import math
from pathlib import Path

import pytest
import torch
from learner_world import run_config, tiny_model

from openforge.learner.backends.torch_fsdp import TorchBackend
from openforge.learner.step import batch_of, step_of
from openforge.protos import (
    EndReason,
    Sequence,
    Span,
    TaskRef,
    TrajectoryVerified,
    VersionSpan,
    pack_ids,
    pack_logprobs,
)

PROMPT = [1, 40, 50, 60]
TEMPERATURE = 0.8
GROUPS, SIZE = 4, 8


def play(backend: TorchBackend, version: int, generator: torch.Generator) -> list[TrajectoryVerified]:
    """Each episode draws one token; an even one earns 1."""
    with torch.no_grad():
        logits_V = backend.policy.model(torch.tensor([PROMPT])).logits[0, -1] / TEMPERATURE
    logprobs_V = logits_V.log_softmax(-1)
    drawn = torch.multinomial(logprobs_V.exp(), GROUPS * SIZE, replacement=True, generator=generator).tolist()
    return [
        TrajectoryVerified(
            run="bandit",
            episode=f"g{index // SIZE}-{index % SIZE}",
            attempt=0,
            group=f"g{index // SIZE}",
            purpose="train",
            task=TaskRef(env="bandit", task="even", seed=0),
            harness="direct",
            sequences=(
                Sequence(
                    ids=pack_ids([*PROMPT, token]),
                    loss=(Span(len(PROMPT), 1),),
                    logprobs=pack_logprobs([logprobs_V[token].item()]),
                    versions=(VersionSpan(len(PROMPT), 1, version),),
                    turns=(0,),
                ),
            ),
            temperature=TEMPERATURE,
            reward=float(token % 2 == 0),
            ended=EndReason.FINISHED,
        )
        for index, token in enumerate(drawn)
    ]


@pytest.mark.parametrize("algorithm", [{"loss": "reinforce_is"}, {"loss": "ppo_clip", "advantage": "rloo"}])
def test_the_reward_of_a_bandit_rises(tmp_path: Path, algorithm: dict[str, str]) -> None:
    config = run_config(tiny_model(tmp_path), algorithm=algorithm, learner={"learning_rate": 1e-2})
    backend, generator = TorchBackend(config), torch.Generator().manual_seed(0)
    rewards = []
    for version in range(25):
        episodes = play(backend, version, generator)
        groups = [f"g{index}" for index in range(GROUPS)]
        batch = batch_of(version, groups, {one.episode: one for one in episodes}, 0)
        step = step_of(batch, config.algorithm, backend.vocabulary)
        stats = backend.train(step.sequences, version)
        assert math.isclose(stats.ratio_mean, 1.0, abs_tol=1e-4), "on policy the ratio is one"
        assert stats.gap_max < 1e-4
        rewards.append(step.reward_mean)
    assert sum(rewards[:3]) / 3 < 0.7
    assert sum(rewards[-3:]) / 3 > 0.95

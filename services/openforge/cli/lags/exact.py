"""Learning from tokens of which each is exactly so many versions old: the worst that a `max_lag` of that size allows.

The learner's own batches, losses and steps on the tasks of the environment `letters`; in the place of services a loop
in this process, which samples with the weights of that many versions before. Promises: the same arguments give the same
curve; a reward is that of the newest weights on tasks drawn for it alone, so that a curve shows what was learned.
"""

from __future__ import annotations

import runpy
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from openforge.chat.contract import Message, Renderer
from openforge.chat.renderers import load_renderer
from openforge.cli.lags.measured import WHY, Curve
from openforge.env.contract import TaskInstance
from openforge.env.registry import load_environment
from openforge.learner.backends.choose import backend_for
from openforge.learner.backends.contract import StepStats
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
from openforge.runs import RunConfig
from openforge.runs.model import model_folder
from openforge.runs.names import episode_of, train_group

ENVIRONMENT = "letters"


def learned(config: RunConfig, max_lag: int) -> Curve:
    """Train the run's steps on what the weights of `max_lag` versions before sampled, where there are so many."""
    backend, table = backend_for(config), Table(config)
    policies = deque([_copied(backend.export())], maxlen=max_lag + 1)
    rewards: list[float] = []
    steps: list[StepStats] = []
    for version in range(config.run.steps):
        table.seat(policies[0])
        groups = table.play(version, version - min(version, max_lag))
        batch = batch_of(
            version, list(dict.fromkeys(one.group for one in groups)), {one.episode: one for one in groups}, 0
        )
        steps.append(backend.train(step_of(batch, config.algorithm, backend.vocabulary).sequences, version))
        policies.append(_copied(backend.export()))
        table.seat(policies[-1])
        rewards.append(fmean(one.reward for one in table.play(config.run.steps + version, version)))
    metrics = {name: fmean(getattr(step, name) for step in steps) for name in WHY}
    return Curve(seed=config.run.seed, max_lag=max_lag, rewards=rewards, metrics=metrics)


class Table:
    """Where a policy answers tasks and is scored by the environment's own check."""

    def __init__(self, config: RunConfig) -> None:
        folder = model_folder(config.model.path)
        environment = load_environment(ENVIRONMENT)
        self._config = config
        self._templates = environment.tasks()
        self._share: Callable[[bytes, str], float] = runpy.run_path(_check(environment))["share"]
        self._renderer: Renderer = load_renderer(config.model.renderer, folder)
        self._model = _model(folder)
        self._generator = torch.Generator()

    def seat(self, weights: Mapping[str, Tensor]) -> None:
        """Whose answers the next ones are."""
        self._model.load_state_dict(weights, strict=False)  # a tied head has no weights of its own

    def play(self, step: int, version: int) -> list[TrajectoryVerified]:
        """A batch, the same tasks and draws for the same step."""
        pacing = self._config.pacing
        self._generator.manual_seed(1_000_003 * self._config.run.seed + step)
        ordinals = range(step * pacing.groups_per_step, (step + 1) * pacing.groups_per_step)
        seats = [(self._task(ordinal), ordinal, member) for ordinal in ordinals for member in range(pacing.group_size)]
        prompts = [self._renderer.render([Message(role="user", content=task.instruction)], ()) for task, _, _ in seats]
        return [
            self._trajectory(task, train_group(ordinal), member, version, prompt, *answer)
            for (task, ordinal, member), prompt, answer in zip(seats, prompts, self._answers(prompts), strict=True)
        ]

    def _task(self, ordinal: int) -> TaskInstance:
        template = self._templates[ordinal % len(self._templates)]
        return template.draw(self._config.run.seed * 1_000_003 + ordinal, "train")

    def _answers(self, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
        """Ids up to the stop token, and their log-probs; all prompts at once, the shorter ones filled up on their left
        with what nothing attends to."""
        sampling, cache = self._config.sampling, None
        longest = max(map(len, prompts))
        ids_BT = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        seen_BT = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        drawn, said = list[Tensor](), list[Tensor]()
        with torch.no_grad():
            for _ in range(sampling.max_tokens):
                places_BT = (seen_BT.cumsum(-1) - 1).clamp(min=0)[:, -ids_BT.shape[1] :]
                out = self._model(
                    input_ids=ids_BT,
                    attention_mask=seen_BT,
                    position_ids=places_BT,
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1,
                )
                cache = out.past_key_values
                logprobs_BV = (out.logits[:, -1].float() / sampling.temperature).log_softmax(-1)
                ids_BT = torch.multinomial(logprobs_BV.exp(), 1, generator=self._generator)
                seen_BT = torch.cat((seen_BT, torch.ones_like(ids_BT)), 1)
                drawn.append(ids_BT)
                said.append(logprobs_BV.gather(1, ids_BT))
        rows = zip(torch.cat(drawn, 1).tolist(), torch.cat(said, 1).tolist(), strict=True)
        return [self._stopped(ids, logprobs) for ids, logprobs in rows]

    def _stopped(self, ids: list[int], logprobs: list[float]) -> tuple[list[int], list[float]]:
        stops = [place for place, token in enumerate(ids) if token in self._renderer.stop_token_ids]
        length = stops[0] + 1 if stops else len(ids)
        return ids[:length], logprobs[:length]

    def _trajectory(
        self,
        task: TaskInstance,
        group: str,
        member: int,
        version: int,
        prompt: list[int],
        ids: list[int],
        logprobs: list[float],
    ) -> TrajectoryVerified:
        sequence = Sequence(
            ids=pack_ids([*prompt, *ids]),
            loss=(Span(len(prompt), len(ids)),),
            logprobs=pack_logprobs(logprobs),
            versions=(VersionSpan(len(prompt), len(ids), version),),
            turns=(0,),
        )
        return TrajectoryVerified(
            run=self._config.run.name,
            episode=episode_of(group, member),
            attempt=0,
            group=group,
            purpose="train",
            task=TaskRef(env=ENVIRONMENT, task=task.task, seed=task.seed),
            harness=ENVIRONMENT,
            sequences=(sequence,),
            temperature=self._config.sampling.temperature,
            reward=self._share(self._renderer.text(ids).encode(), task.verify[-1]),
            ended=EndReason.FINISHED,
        )


def _check(environment: Any) -> str:
    return str(Path(environment.__file__).parent / "tasks/shared/tests/check.py")


def _model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _copied(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in weights.items()}

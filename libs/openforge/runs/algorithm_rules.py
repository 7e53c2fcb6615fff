"""Which settings of `[algorithm]` go together.

Promises: what is let through has one meaning, and nothing that was written is silently without effect where that
would change what is learned; every problem names the field, its value and the way out.
"""

from collections.abc import Iterator

from openforge.runs.config import AlgorithmSection, RunConfig

CLIPPED = ("ppo_clip", "gspo", "cispo", "dppo_tv")
"""Losses whose ratio to `objective`'s log-probs is bounded; `reinforce_is` is weighted instead."""

GSPO_CLIP_MOST = 0.05
"""Far above every published range of sequence-level clips (3e-4, 4e-4), far below those of tokens."""


def algorithm_problems(config: RunConfig) -> Iterator[str]:
    algorithm = config.algorithm
    yield from _weights(algorithm)
    yield from _clips(algorithm)
    yield from _aggregation(algorithm)
    yield from _shaping(algorithm)
    yield from _cycle(config)
    yield from _critic(config)
    yield from _lora(config)


def _weights(algorithm: AlgorithmSection) -> Iterator[str]:
    if algorithm.objective == "decoupled" and algorithm.loss == "reinforce_is":
        yield (
            'algorithm.objective = "decoupled" with algorithm.loss = "reinforce_is": that loss has no centre to '
            'decouple, it weighs by pi/mu itself; write loss = "ppo_clip", or objective = "bypass"'
        )
    if algorithm.objective == "bypass" and algorithm.loss in CLIPPED and algorithm.correction not in ("auto", "none"):
        yield (
            f'algorithm.correction = "{algorithm.correction}" with algorithm.objective = "bypass" and algorithm.loss = '
            f'"{algorithm.loss}": the ratio to what sampled already is the correction and would count twice; write '
            'correction = "none", or objective = "decoupled"'
        )
    if algorithm.correction == "icepop" and algorithm.ratio_floor >= algorithm.ratio_cap:
        yield (
            f"algorithm.ratio_floor = {algorithm.ratio_floor:g} is not below algorithm.ratio_cap = "
            f"{algorithm.ratio_cap:g}, so icepop would leave no token: 0.5 and 2.0 are usual"
        )


def _clips(algorithm: AlgorithmSection) -> Iterator[str]:
    if 0 < algorithm.dual_clip <= 1:
        yield f"algorithm.dual_clip = {algorithm.dual_clip:g} must be above 1 (3.0 is usual), or 0 for none"
    if algorithm.dual_clip > 0 and algorithm.loss != "ppo_clip":
        yield (
            f'algorithm.dual_clip = {algorithm.dual_clip:g} with algorithm.loss = "{algorithm.loss}": only ppo_clip '
            'has a dual clip; write dual_clip = 0, or loss = "ppo_clip"'
        )
    if algorithm.loss == "gspo":
        for name in ("clip_low", "clip_high"):
            if (value := getattr(algorithm, name)) > GSPO_CLIP_MOST:
                yield (
                    f'algorithm.{name} = {value:g} with algorithm.loss = "gspo": ratios of whole sequences are means '
                    f"over tokens and never get as far; write {GSPO_CLIP_MOST:g} or less (3e-4 and 4e-4 are published)"
                )


def _aggregation(algorithm: AlgorithmSection) -> Iterator[str]:
    if algorithm.loss == "gspo" and algorithm.aggregation not in ("sequence_mean", "episode_mean"):
        yield (
            f'algorithm.aggregation = "{algorithm.aggregation}" with algorithm.loss = "gspo": a sequence is one unit '
            'there; write aggregation = "sequence_mean"'
        )
    if algorithm.aggregation == "constant" and algorithm.horizon < 1:
        yield (
            f'algorithm.aggregation = "constant" with algorithm.horizon = {algorithm.horizon}: write the constant to '
            "divide by, the most tokens that an episode may sample for example"
        )
    if algorithm.aggregation != "constant" and algorithm.horizon:
        yield (
            f'algorithm.horizon = {algorithm.horizon} with algorithm.aggregation = "{algorithm.aggregation}" has no '
            'effect: write aggregation = "constant", or leave horizon out'
        )


def _shaping(algorithm: AlgorithmSection) -> Iterator[str]:
    if algorithm.overlong_buffer and not algorithm.overlong_tokens:
        yield (
            f"algorithm.overlong_buffer = {algorithm.overlong_buffer} without algorithm.overlong_tokens has no "
            "effect: write the length in sampled tokens at which the whole penalty is due"
        )
    if algorithm.overlong_tokens and algorithm.overlong_buffer > algorithm.overlong_tokens:
        yield (
            f"algorithm.overlong_buffer = {algorithm.overlong_buffer} is more than algorithm.overlong_tokens = "
            f"{algorithm.overlong_tokens}: every answer would be punished; write a fifth of it for example"
        )


def _cycle(config: RunConfig) -> Iterator[str]:
    algorithm, groups = config.algorithm, config.pacing.groups_per_step
    if 1 <= groups < algorithm.mini_batches:
        yield (
            f"algorithm.mini_batches = {algorithm.mini_batches} is more than pacing.groups_per_step = {groups}, and "
            f"groups are not cut: write {groups} or less"
        )


def _critic(config: RunConfig) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.advantage != "gae":
        for name, without in (("gamma", 1.0), ("gae_lambda", 1.0)):
            if (value := getattr(algorithm, name)) != without:
                yield (
                    f'algorithm.{name} = {value:g} with algorithm.advantage = "{algorithm.advantage}" has no effect: '
                    f'write advantage = "gae", or leave {name} out'
                )
    elif config.learner.backend != "torch":
        yield (
            f'algorithm.advantage = "gae" with learner.backend = "{config.learner.backend}": only the torch backend '
            'has a critic; write backend = "torch", or advantage = "grpo"'
        )


def _lora(config: RunConfig) -> Iterator[str]:
    lora = config.learner.lora
    if lora.rank and config.learner.backend != "torch":
        yield (
            f'learner.lora.rank = {lora.rank} with learner.backend = "{config.learner.backend}": only the torch '
            "backend trains adapters; write rank = 0"
        )
    if lora.rank and not lora.targets:
        yield 'learner.lora.targets = [] names no layer: write ["all-linear"], or layers such as ["q_proj", "v_proj"]'
    if "all-linear" in lora.targets and len(lora.targets) > 1:
        yield 'learner.lora.targets: "all-linear" already is all of them; name it alone'

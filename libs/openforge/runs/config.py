"""The run file: what a run does. Where it runs is the environment's business.

Promises: what was accepted here is complete and consistent; every default stands here and nowhere else.
"""

from typing import Literal

import msgspec


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class RunSection(_Section, frozen=True, kw_only=True):
    """`steps` is the number of committed training batches. `seed` draws tasks and sampling."""

    name: str
    steps: int
    seed: int = 0
    trusted_only: bool = False
    trust_env_reward: bool = False
    no_progress_s: float = 600.0


class ModelSection(_Section, frozen=True, kw_only=True):
    """`path` is a Hugging Face folder, relative to the run file, or `builtin:NAME` of `openforge model`."""

    path: str
    renderer: str = "chatml-hermes"
    context: int = 2048


class EngineSection(_Section, frozen=True, kw_only=True):
    """`embedded` is our CPU engine; `vllm` starts and drives a real vLLM server with `vllm_args`."""

    kind: Literal["embedded", "vllm"] = "embedded"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    threads: int = 1
    max_requests: int = 64
    keep_versions: int = 3
    vllm_args: tuple[str, ...] = ()


class SamplingSection(_Section, frozen=True, kw_only=True):
    """Pinned for every turn, whatever the harness asks. `max_tokens` is per turn."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()


class LimitsSection(_Section, frozen=True, kw_only=True):
    turns: int = 10
    timeout_s: float = 120.0
    memory_mb: int = 512
    pids: int = 128
    disk_mb: int = 64
    cpus: float = 1.0


class EnvironmentSection(_Section, frozen=True, kw_only=True):
    """`name` is an entry point of group `openforge.envs` or a path to an `env.py`.

    `tasks` are the templates to draw from, all of them where empty. `options` go to `create_env`.
    """

    name: str
    harness: str
    tasks: tuple[str, ...] = ()
    options: dict[str, str | int | float | bool | tuple[str, ...]] = {}
    limits: LimitsSection = LimitsSection()


class PacingSection(_Section, frozen=True, kw_only=True):
    """How work is opened. `attempts` is how often one slot is tried; `in_flight` bounds open episodes."""

    groups_per_step: int = 8
    group_size: int = 8
    in_flight: int = 64
    attempts: int = 3
    max_lag: int = 1
    staleness: Literal["drop", "wait", "mask"] = "drop"
    wait_timeout_s: float = 300.0
    dynamic_sampling: bool = False
    refills_per_step: int = 8


class AlgorithmSection(_Section, frozen=True, kw_only=True):
    """`reinforce_is`: -sg(min(pi/mu, ratio_cap)) * A * log pi. `ppo_clip`: PPO against mu."""

    advantage: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    advantage_eps: float = 1e-6
    loss: Literal["reinforce_is", "ppo_clip"] = "reinforce_is"
    ratio_cap: float = 2.0
    clip_low: float = 0.2
    clip_high: float = 0.28
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"


class TrainingSection(_Section, frozen=True, kw_only=True):
    """Which of a harness's conversations are trained beside the agent's own.

    `context`: their tokens are counted and left out. `side_calls` are titles, summaries and the like.
    """

    side_calls: Literal["train", "context"] = "train"
    sub_agents: Literal["train", "context"] = "train"


class LearnerSection(_Section, frozen=True, kw_only=True):
    """`row_tokens` is the longest packed row; a longer sequence is retired. `threads` is torch's.

    After `warmup_steps` of rising learning rate it falls linearly, to zero after step `decay_steps`; 0 keeps it.
    """

    backend: Literal["torch", "verl"] = "torch"
    backend_options: dict[str, str | int | float | bool] = {}
    learning_rate: float = 1e-5
    warmup_steps: int = 0
    decay_steps: int = 0
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    gradient_clip: float = 1.0
    autocast: Literal["none", "bfloat16"] = "none"
    row_tokens: int = 2048
    threads: int = 1
    world_size: int = 1
    checkpoint_every: int = 5
    keep_checkpoints: int = 2


class EvaluationSection(_Section, frozen=True, kw_only=True):
    """Held-out episodes before the first and after the last step, at the run's own sampling."""

    heldout_episodes: int = 0
    before: bool = True
    after: bool = True


class RunConfig(_Section, frozen=True, kw_only=True):
    run: RunSection
    model: ModelSection
    engine: EngineSection = EngineSection()
    sampling: SamplingSection = SamplingSection()
    environment: EnvironmentSection
    pacing: PacingSection = PacingSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    training: TrainingSection = TrainingSection()
    learner: LearnerSection = LearnerSection()
    evaluation: EvaluationSection = EvaluationSection()

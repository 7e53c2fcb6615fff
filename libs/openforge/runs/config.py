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
    """`path` is a Hugging Face folder, relative to the run file, or `builtin:NAME` of `openforge model`.

    Only a run against somebody else's endpoint needs none.
    """

    path: str = ""
    renderer: str = "chatml-hermes"
    context: int = 2048


class EngineSection(_Section, frozen=True, kw_only=True):
    """`embedded` is our CPU engine; `vllm` starts and drives a real vLLM server with `vllm_args`.

    `weight_path` is how new weights reach a vLLM server: it reads the published folder (`disk`), or the learner
    broadcasts them to its workers over `nccl`, or without GPUs over `gloo`. `lora` is what engines get of a run that
    trains adapters: the `adapters` alone, or whole weights with them `merged`.

    `endpoint` evaluates `model` of an OpenAI-compatible endpoint that somebody else serves: `url` ends where
    `/chat/completions` begins, `key_env` names the environment variable that holds the key, none where empty. Its
    tokens are not known, so nothing can be trained. `max_requests` are open at once at most.

    `batch_invariant` (embedded alone; `openforge eval` sets it): an answer is the same to the bit whatever is computed
    beside it, so that the same seed repeats it. Prompts and answers cost more.
    """

    kind: Literal["embedded", "vllm", "endpoint"] = "embedded"
    url: str = ""
    model: str = ""
    key_env: str = ""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    threads: int = 1
    max_requests: int = 64
    batch_invariant: bool = False
    keep_versions: int = 3
    vllm_args: tuple[str, ...] = ()
    weight_path: Literal["disk", "nccl", "gloo"] = "disk"
    lora: Literal["adapters", "merged"] = "adapters"


class WeightsSection(_Section, frozen=True, kw_only=True):
    """`store` is where the learner publishes each version.

    Where empty its own folder, which engines have to see; another folder that both see, such as `/mnt/weights`;
    `s3://bucket/prefix`; or `nats`, the bus's own object store. From the last two, engines fetch to a cache of theirs.
    A run may be resumed with another store.
    """

    store: str = ""


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

    `tasks` are the templates to draw from, all of them where empty. `options` are the environment's own. `runtime` is
    what agents' sandboxes run on, `runsc` for one: an OCI runtime of the container daemon or a runtime class of the
    cluster, the deployment's own where empty.
    """

    name: str
    harness: str
    tasks: tuple[str, ...] = ()
    options: dict[str, str | int | float | bool | tuple[str, ...]] = {}
    runtime: str = ""
    limits: LimitsSection = LimitsSection()


class PacingSection(_Section, frozen=True, kw_only=True):
    """How work is opened. `attempts` is how often one slot is tried; `in_flight` bounds open episodes.

    With `in_flight_least` the bound moves between it and `in_flight`, as busy as the engines are; 0 means always
    `in_flight`.

    A batch takes every group that is ready, `groups_per_step` at least and `groups_per_step_most` at most; 0 means
    always `groups_per_step`.
    """

    groups_per_step: int = 8
    groups_per_step_most: int = 0
    group_size: int = 8
    in_flight: int = 64
    in_flight_least: int = 0
    attempts: int = 3
    max_lag: int = 1
    staleness: Literal["drop", "wait", "mask"] = "drop"
    wait_timeout_s: float = 300.0
    dynamic_sampling: bool = False
    refills_per_step: int = 8

    def most_groups_per_step(self) -> int:
        return self.groups_per_step_most or self.groups_per_step


class AlgorithmSection(_Section, frozen=True, kw_only=True):
    """What is learned from a batch: formulas, sources and published settings are in `docs/algorithms.md`.

    `advantage` compares rewards (`gae` with a critic), `loss` is per token, `aggregation` weighs tokens. `objective`
    is what the ratio is against: the recorded log-probs (`bypass`), or those that the learner's own weights give
    before the step (`decoupled`). `correction` is the weight for who sampled: `auto` is `token_tis` where the loss
    needs one. `ratio_cap` bounds weights from above, `ratio_floor` is icepop's other end. `horizon` is the constant
    of `constant`. With `completion_weights` episodes stand for those of their group that were lost. `kl_coefficient` 0
    has no reference. `overlong_tokens` 0 shapes no reward. A batch is cut into `mini_batches` of whole groups, one
    optimizer step each, and gone over `epochs` times.
    """

    advantage: Literal[
        "grpo", "dr_grpo", "rloo", "maxrl", "grpo_batch_std", "reinforce_pp", "reinforce_pp_baseline", "gae"
    ] = "grpo"
    advantage_eps: float = 1e-6
    loss: Literal["reinforce_is", "ppo_clip", "gspo", "cispo", "dppo_tv"] = "reinforce_is"
    objective: Literal["bypass", "decoupled"] = "bypass"
    correction: Literal["auto", "none", "token_tis", "sequence_tis", "icepop"] = "auto"
    ratio_cap: float = 2.0
    ratio_floor: float = 0.5
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 0.0
    aggregation: Literal["token_mean", "sequence_mean", "episode_mean", "constant"] = "token_mean"
    horizon: int = 0
    completion_weights: bool = False
    kl_coefficient: float = 0.0
    kl_estimator: Literal["k1", "k2", "k3", "k3_plus"] = "k3"
    overlong_tokens: int = 0
    overlong_buffer: int = 0
    overlong_penalty: float = 1.0
    mini_batches: int = 1
    epochs: int = 1
    gamma: float = 1.0
    gae_lambda: float = 1.0
    value_clip: float = 0.2


class LoraSection(_Section, frozen=True, kw_only=True):
    """Low-rank adapters are trained instead of the weights where `rank` is above 0.

    `targets` are the names of linear layers, or `all-linear`.
    """

    rank: int = 0
    alpha: float = 32.0
    targets: tuple[str, ...] = ("all-linear",)


class TrainingSection(_Section, frozen=True, kw_only=True):
    """Which of a harness's calls are trained beside the free answers of the agent itself.

    `context`: their tokens are counted and left out. `side_calls` are titles, summaries and the like. `guided` are
    answers that had to match a grammar or a schema, such as forced calls: `train` takes what the guide left of the
    policy's distribution for an older policy. A harness that asks for a schema in each call trains nothing without it.
    `ambiguous` are several answers to one call of which nothing shows which one was used: `train` is for harnesses
    that sample the same call several times at once and use each answer.
    """

    side_calls: Literal["train", "context"] = "train"
    sub_agents: Literal["train", "context"] = "train"
    guided: Literal["train", "context"] = "context"
    ambiguous: Literal["train", "drop"] = "drop"


class LearnerSection(_Section, frozen=True, kw_only=True):
    """`row_tokens` is the longest packed row; a longer sequence is retired. `threads` is torch's.

    The `keep_checkpoints` newest checkpoints stay, and the `keep_best_checkpoints` whose last `checkpoint_every`
    batches had the highest mean reward.

    `critic_learning_rate` is for `algorithm.advantage = "gae"`. After `warmup_steps` of rising learning rate it falls
    linearly, to zero after step `decay_steps`; 0 keeps it.

    `routing_replay` is for mixtures of experts: engines record which experts each token went through, and training
    sends it through the same ones (R3, arXiv 2510.11370).
    """

    backend: Literal["torch", "verl"] = "torch"
    backend_options: dict[str, str | int | float | bool] = {}
    learning_rate: float = 1e-5
    critic_learning_rate: float = 1e-5
    warmup_steps: int = 0
    decay_steps: int = 0
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    gradient_clip: float = 1.0
    autocast: Literal["none", "bfloat16"] = "none"
    row_tokens: int = 2048
    routing_replay: bool = False
    threads: int = 1
    world_size: int = 1
    checkpoint_every: int = 5
    keep_checkpoints: int = 2
    keep_best_checkpoints: int = 1
    lora: LoraSection = LoraSection()


HOW_IT_IS_TRAINED = ("threads", "world_size", "checkpoint_every", "keep_checkpoints", "keep_best_checkpoints")
"""Fields of the learner that say where a batch is computed and how often is saved: a run may be resumed with others."""


class EvaluationSection(_Section, frozen=True, kw_only=True):
    """Held-out episodes before the first and after the last step, at the run's own sampling.

    `heldout_episodes` tasks are drawn, each tried `trials` times. `openforge eval` compares `harnesses`, the run's own
    where empty, and reports pass@k and pass^k for each of `k`, for 1 and `trials` where empty. `harness_options` are
    `environment.options` of the harnesses named there.
    """

    heldout_episodes: int = 0
    before: bool = True
    after: bool = True
    trials: int = 1
    harnesses: tuple[str, ...] = ()
    k: tuple[int, ...] = ()
    harness_options: dict[str, dict[str, str | int | float | bool | tuple[str, ...]]] = {}


class JudgeSection(_Section, frozen=True, kw_only=True):
    """The model that checks may ask, behind any OpenAI-compatible endpoint; none where `url` is empty.

    `url` ends where `/chat/completions` begins. `key_env` names the environment variable of the verifier that holds the
    key, none where empty. An answer has `max_tokens` at most; `at_once` calls are open at most.
    """

    url: str = ""
    model: str = ""
    key_env: str = ""
    max_tokens: int = 1024
    at_once: int = 8


class RunConfig(_Section, frozen=True, kw_only=True):
    run: RunSection
    model: ModelSection = ModelSection()
    engine: EngineSection = EngineSection()
    weights: WeightsSection = WeightsSection()
    sampling: SamplingSection = SamplingSection()
    environment: EnvironmentSection
    pacing: PacingSection = PacingSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    training: TrainingSection = TrainingSection()
    learner: LearnerSection = LearnerSection()
    evaluation: EvaluationSection = EvaluationSection()
    judge: JudgeSection = JudgeSection()

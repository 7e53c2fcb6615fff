"""What a run file may say beyond its types: ranges, and values that must fit one another.

Promises: every problem is one sentence that names the field, its value and the way out.
"""

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from openforge.env.contract import BadTask, EnvironmentModule
from openforge.env.registry import BadEnvironment, NoSuchEnvironment, load_environment, options_of, select
from openforge.protos import BadKey, token
from openforge.runs.algorithm_rules import algorithm_problems
from openforge.runs.config import LimitsSection, RunConfig
from openforge.runs.mismatch import mismatch, shown

# The least allowed value, and why or what to write instead.
_LEAST: dict[str, tuple[float, str]] = {
    "run.steps": (0, "0 only evaluates"),
    "run.seed": (0, "any whole number from 0"),
    "run.no_progress_s": (1, "the seconds without progress after which the run ends"),
    "model.context": (16, "the window of the model in tokens, 2048 for example"),
    "engine.threads": (1, "one thread is the least"),
    "engine.max_requests": (1, "one request at a time is the least"),
    "engine.keep_versions": (2, "the version before must stay while a new one loads"),
    "sampling.top_k": (0, "0 means no such limit"),
    "sampling.max_tokens": (1, "the tokens one turn may sample"),
    "environment.limits.turns": (1, "one model call is the least"),
    "environment.limits.memory_mb": (16, "a shell needs about as much"),
    "environment.limits.pids": (4, "a shell with a pipe needs about as many"),
    "environment.limits.cpus": (0.01, "the share of cores of one sandbox: kernels and container engines take no less"),
    "environment.limits.disk_mb": (1, "the agent must be able to write"),
    "pacing.groups_per_step": (1, "a batch needs a group"),
    "pacing.groups_per_step_most": (0, "0 means always pacing.groups_per_step"),
    "pacing.group_size": (2, "one reward has nothing to be compared with, so it teaches nothing; 8 is usual"),
    "pacing.in_flight": (1, "write at least pacing.group_size"),
    "pacing.in_flight_least": (0, "0 means always pacing.in_flight"),
    "pacing.attempts": (1, "1 means no second try"),
    "pacing.max_lag": (0, "0 trains synchronously, 1 overlaps one step"),
    "pacing.refills_per_step": (0, "0 refills none"),
    "algorithm.horizon": (0, "the tokens that constant divides by, those of the longest answer for example"),
    "algorithm.kl_coefficient": (0, "0 has no reference"),
    "algorithm.dual_clip": (0, "0 is off, 3.0 is usual"),
    "algorithm.overlong_tokens": (0, "0 shapes no reward"),
    "algorithm.overlong_buffer": (0, "0 has no slope before the penalty"),
    "algorithm.overlong_penalty": (0, "1.0 is usual"),
    "algorithm.mini_batches": (1, "1 takes one optimizer step for each batch"),
    "algorithm.epochs": (1, "1 goes over a batch once"),
    "algorithm.gamma": (0, "1.0 discounts nothing"),
    "algorithm.gae_lambda": (0, "1.0 compares with what came in the end"),
    "learner.lora.rank": (0, "0 trains all weights"),
    "learner.warmup_steps": (0, "0 means none"),
    "learner.decay_steps": (0, "0 keeps the learning rate"),
    "learner.weight_decay": (0, "0 means none"),
    "learner.row_tokens": (16, "the longest row in tokens, at least the longest episode"),
    "learner.threads": (1, "one thread is the least"),
    "learner.world_size": (1, "one process is the least"),
    "learner.checkpoint_every": (1, "1 saves after every step"),
    "learner.keep_checkpoints": (1, "the newest must stay"),
    "learner.keep_best_checkpoints": (0, "0 keeps the newest alone"),
    "evaluation.heldout_episodes": (0, "0 evaluates nothing"),
    "evaluation.trials": (1, "1 tries each task once"),
    "judge.max_tokens": (1, "an answer is one JSON object, 1024 for example"),
    "judge.at_once": (1, "one call at a time is the least"),
}

# Tokens, seconds, MB and episodes: more is a slip of the hand. Options are the environment's or the backend's own.
_MOST = 2**31 - 1
_MOST_OF_OPTIONS = 2**53

# What a sandbox needs beside its files: its own small file systems, and room for a shell and an interpreter.
_MEMORY_BESIDE_FILES_MB = 96

_ABOVE_ZERO: dict[str, str] = {
    "sampling.temperature": "greedy answers have no log-probs to learn from; 0.7 or 1.0 are usual",
    "sampling.top_p": "1.0 means no such limit",
    "environment.limits.timeout_s": "the wall clock of one attempt in seconds",
    "pacing.wait_timeout_s": "the seconds one group may keep a batch waiting",
    "algorithm.advantage_eps": "it keeps the division by the spread finite; 1e-6 is usual",
    "algorithm.ratio_cap": "2.0 is usual",
    "algorithm.ratio_floor": "0.5 is usual",
    "algorithm.clip_low": "0.2 is usual",
    "algorithm.clip_high": "0.28 is usual",
    "algorithm.value_clip": "0.2 is usual",
    "learner.learning_rate": "1e-5 is usual for a full fine-tune",
    "learner.critic_learning_rate": "1e-5 is usual",
    "learner.lora.alpha": "twice the rank is usual",
    "learner.gradient_clip": "1.0 is usual",
}

_NOT_ABOVE: dict[str, tuple[float, str]] = {
    "run.steps": (1_000_000, "split a longer run"),
    "engine.threads": (1024, "no machine has more"),
    "learner.threads": (1024, "no machine has more"),
    "sampling.top_p": (1.0, "1.0 means no such limit"),
    "algorithm.clip_low": (1.0, "a ratio cannot fall below 0"),
    "algorithm.gamma": (1.0, "1.0 discounts nothing"),
    "algorithm.gae_lambda": (1.0, "1.0 compares with what came in the end"),
}


_BUCKET = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9!_.*'()-]+)*/?")


def value_of(config: RunConfig, path: str) -> Any:
    here: Any = config
    for name in path.split("."):
        here = getattr(here, name)
    return here


def problems_of(config: RunConfig) -> list[str]:
    """Everything that no run could keep, whatever machine it works on."""
    if beyond := list(_beyond_all_use(config)):
        return beyond  # what follows from such numbers is noise
    return [*_out_of_range(config), *_misnamed(config), *_at_odds(config), *algorithm_problems(config)]


def environment_problems(config: RunConfig) -> list[str]:
    """What the run file asks of its environment and the environment does not have."""
    asked = config.environment
    try:
        module = load_environment(asked.name)
    except (NoSuchEnvironment, BadEnvironment) as error:  # "environment = 'its name' ..."
        return [f"environment.name{str(error).removeprefix('environment')}"]
    try:
        known = [template.id for template in select(module, ())]
    except (BadEnvironment, BadTask) as error:
        return [f"environment.name = {shown(asked.name)} cannot be used: {error}"]
    problems = []
    named = [
        ("environment.harness", asked.harness),
        *(("evaluation.harnesses", h) for h in config.evaluation.harnesses),
    ]
    known_harnesses = list(module.HARNESSES)
    problems += [_not_among(path, name, known_harnesses) for path, name in named if name not in known_harnesses]
    problems += [_not_among("environment.tasks", task, known) for task in asked.tasks if task not in known]
    compared = [h for h in config.evaluation.harnesses if h not in config.evaluation.harness_options]
    given = [("environment.options", h, asked.options) for h in dict.fromkeys((asked.harness, *compared))]
    given += [(f"evaluation.harness_options.{h}", h, of_h) for h, of_h in config.evaluation.harness_options.items()]
    for path, harness, options in given:
        if harness in known_harnesses:
            problems += _of_options(module, path, harness, options)
    return problems


def _of_options(module: EnvironmentModule, path: str, harness: str, options: Mapping[str, Any]) -> Iterator[str]:
    if (known := options_of(module, harness)) is None:
        return
    for name, value in options.items():
        if name not in known:
            write = f"write one of {', '.join(sorted(known))}" if known else "leave it out, there is none"
            in_limits = name in LimitsSection.__struct_fields__
            way_out = f"write environment.limits.{name}" if in_limits else write
            yield f"{path}.{name} = {shown(value)} is no option of harness {shown(harness)}: {way_out}"
            continue
        yield from mismatch(f"{path}.{name}", value, known[name])


def _not_among(path: str, value: str, known: list[str]) -> str:
    close = difflib.get_close_matches(value, known, n=1)
    way_out = f"did you mean {shown(close[0])}?" if close else f"write one of {', '.join(sorted(known))}"
    return f"{path} = {shown(value)} is not in this environment: {way_out}"


def _beyond_all_use(config: RunConfig) -> Iterator[str]:
    """Numbers that the streams could not carry, since JSON has no infinity, or that no machine could count to."""
    for path, value in leaves("", msgspec.to_builtins(config)):
        most = _MOST_OF_OPTIONS if "options" in path else _MOST
        for number in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(number, (int, float)) and abs(number) > most:
                yield f"{path} = {shown(number)} is no number that a run can use: write {most} or less"


def leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The dotted name and the value of everything below `value` that is no section."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from leaves(f"{path}.{name}" if path else name, inner)
    else:
        yield path, value


def _out_of_range(config: RunConfig) -> Iterator[str]:
    for path, (least, why) in _LEAST.items():
        value = value_of(config, path)
        if not value >= least:
            yield f"{path} = {shown(value)} is too small: write {least:.12g} or more ({why})"
    for path, why in _ABOVE_ZERO.items():
        value = value_of(config, path)
        if not value > 0:
            yield f"{path} = {shown(value)} must be above 0 ({why})"
    for path, (most, why) in _NOT_ABOVE.items():
        value = value_of(config, path)
        if value > most:
            yield f"{path} = {shown(value)} is too large: write {most:.12g} or less ({why})"
    for beta in config.learner.betas:
        if not 0 <= beta < 1:
            yield f"learner.betas = {shown(list(config.learner.betas))}: each must be from 0 to below 1 (0.9, 0.95)"
            break


def _misnamed(config: RunConfig) -> Iterator[str]:
    try:
        token("run.name", config.run.name)
    except BadKey as bad:
        yield str(bad)
    needed = ["environment.name", "environment.harness"]
    needed += ["engine.url", "engine.model"] if config.engine.kind == "endpoint" else ["model.path"]
    for path in needed:
        if not value_of(config, path).strip():
            yield f'{path} = "" is empty: name one'
    if "" in config.sampling.stop:
        yield 'sampling.stop has "", which every answer ends with before it begins: leave it out'
    if len(set(config.environment.tasks)) < len(config.environment.tasks):
        yield "environment.tasks names a task twice: name each once, every task is drawn evenly"


def _stores(config: RunConfig) -> Iterator[str]:
    store = config.weights.store
    if not store:
        return
    folder = store.startswith("/") and ".." not in store.split("/")
    if not (folder or store == "nats" or (_BUCKET.fullmatch(store) and ".." not in store)):
        yield (
            f"weights.store = {shown(store)} is no place for weights: write the absolute path of a folder that learner "
            'and engines see, "s3://bucket/prefix", or "nats" for the bus\'s own store; or leave it out'
        )
    elif config.engine.kind == "endpoint":
        yield (
            f'weights.store = {shown(store)} with engine.kind = "endpoint": nothing is trained, so nothing is '
            "published; leave it out"
        )


def _at_odds(config: RunConfig) -> Iterator[str]:
    pacing, evaluation = config.pacing, config.evaluation
    if 1 <= pacing.in_flight < pacing.group_size:
        yield (
            f"pacing.in_flight = {pacing.in_flight} is less than pacing.group_size = {pacing.group_size}, so no group "
            f"could ever open: write {pacing.group_size} or more"
        )
    if pacing.in_flight_least > pacing.in_flight:
        yield (
            f"pacing.in_flight_least = {pacing.in_flight_least} is more than pacing.in_flight = {pacing.in_flight}, "
            "the most: write less, or 0 for a bound that does not move"
        )
    if 0 < pacing.in_flight_least < pacing.group_size:
        yield (
            f"pacing.in_flight_least = {pacing.in_flight_least} is less than pacing.group_size = {pacing.group_size}, "
            f"so a busy engine would let no group open: write {pacing.group_size} or more"
        )
    if 0 < pacing.groups_per_step_most < pacing.groups_per_step:
        yield (
            f"pacing.groups_per_step_most = {pacing.groups_per_step_most} is less than pacing.groups_per_step = "
            f"{pacing.groups_per_step}, the least of a batch: write more, or 0 for batches of one size"
        )
    yield from _stores(config)
    yield from _at_odds_in_evaluation(config)
    yield from _at_odds_with_an_endpoint(config)
    yield from _of_endpoints_that_nobody_asks(config)
    if config.judge.url and not config.judge.model:
        yield f'judge.model = "" is empty: name the model that judges at judge.url = {shown(config.judge.url)}'
    limits = config.environment.limits
    if limits.memory_mb < limits.disk_mb + _MEMORY_BESIDE_FILES_MB:
        yield (
            f"environment.limits.memory_mb = {limits.memory_mb} is too little for disk_mb = {limits.disk_mb}, since a "
            f"sandbox's files lie in memory: write {limits.disk_mb + _MEMORY_BESIDE_FILES_MB} or more"
        )
    if config.sampling.max_tokens >= config.model.context:
        yield (
            f"sampling.max_tokens = {config.sampling.max_tokens} leaves no room for a prompt in "
            f"model.context = {config.model.context}: write less"
        )
    if config.run.steps == 0 and evaluation.heldout_episodes == 0:
        yield (
            "run.steps = 0 and evaluation.heldout_episodes = 0: the run would do nothing; "
            "write steps to train, or held-out episodes to evaluate"
        )
    if config.engine.kind != "vllm" and config.engine.weight_path != "disk":
        yield (
            f'engine.weight_path = "{config.engine.weight_path}" with engine.kind = "{config.engine.kind}", which is '
            'no vLLM: write "disk", or engine.kind = "vllm"'
        )
    if config.engine.weight_path != "disk" and config.learner.lora.rank and config.engine.lora == "adapters":
        yield (
            f'engine.weight_path = "{config.engine.weight_path}" with engine.lora = "adapters": a broadcast carries '
            'whole weights alone; write weight_path = "disk", or lora = "merged"'
        )
    if config.engine.kind != "embedded" and config.engine.batch_invariant:
        yield (
            f'engine.batch_invariant = true with engine.kind = "{config.engine.kind}", which decides that by itself: '
            'leave it out, or write engine.kind = "embedded"'
        )
    if config.engine.kind == "vllm" and config.engine.dtype == "float32" and config.learner.autocast == "bfloat16":
        yield (
            'engine.dtype = "float32" with learner.autocast = "bfloat16": the two would disagree on every log-prob; '
            "give both the same precision"
        )


def _at_odds_with_an_endpoint(config: RunConfig) -> Iterator[str]:
    if config.engine.kind != "endpoint":
        return
    if config.run.steps:
        yield (
            f'run.steps = {config.run.steps} with engine.kind = "endpoint": nobody knows the tokens of its answers, so '
            "nothing can be trained; write steps = 0 to evaluate it"
        )
    if config.sampling.top_k:
        yield f"sampling.top_k = {config.sampling.top_k}: endpoints know no such limit; write 0"
    if config.pacing.in_flight_least:
        yield (
            f'pacing.in_flight_least = {config.pacing.in_flight_least} with engine.kind = "endpoint": nobody measures '
            "it; write 0"
        )


def _of_endpoints_that_nobody_asks(config: RunConfig) -> Iterator[str]:
    """What would be ignored in silence."""
    if config.engine.kind != "endpoint":
        for path in ("engine.url", "engine.model", "engine.key_env"):
            if value := value_of(config, path):
                yield (
                    f'{path} = {shown(value)} with engine.kind = "{config.engine.kind}", which asks no endpoint: write '
                    f'engine.kind = "endpoint", or leave {path} out'
                )
    if not config.judge.url:
        for path in ("judge.model", "judge.key_env"):
            if value := value_of(config, path):
                yield f"{path} = {shown(value)} without judge.url asks nobody: write judge.url, or leave {path} out"


def _at_odds_in_evaluation(config: RunConfig) -> Iterator[str]:
    pacing, evaluation = config.pacing, config.evaluation
    if evaluation.heldout_episodes > 0 and not (evaluation.before or evaluation.after):
        yield (
            f"evaluation.heldout_episodes = {evaluation.heldout_episodes}, but evaluation.before and evaluation.after "
            "are both false: set one of them, or write heldout_episodes = 0"
        )
    if evaluation.heldout_episodes > 0 and 1 <= pacing.in_flight < evaluation.trials:
        yield (
            f"pacing.in_flight = {pacing.in_flight} is less than evaluation.trials = {evaluation.trials}, so no task "
            f"could ever be evaluated: write {evaluation.trials} or more"
        )
    if evaluation.heldout_episodes > 0 and 0 < pacing.in_flight_least < evaluation.trials:
        yield (
            f"pacing.in_flight_least = {pacing.in_flight_least} is less than evaluation.trials = {evaluation.trials}, "
            f"so a busy engine would let no task be evaluated: write {evaluation.trials} or more"
        )
    for k in evaluation.k:
        if not 1 <= k <= evaluation.trials:
            yield (
                f"evaluation.k = {shown(list(evaluation.k))}: {k} of {evaluation.trials} trials cannot be drawn; "
                f"write numbers from 1 to evaluation.trials = {evaluation.trials}"
            )
    for harness in evaluation.harness_options:
        if harness not in evaluation.harnesses:
            yield (
                f"evaluation.harness_options has {shown(harness)}, which is not in evaluation.harnesses: "
                "add it there or remove its options"
            )

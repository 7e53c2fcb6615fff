"""What an environment is: tasks, a way to run the agent, and how its work is verified.

An environment is one module `env.py`, found by entry point (group `openforge.envs`) or by path. It
has the attributes of `EnvironmentModule`; `create_env` is needed where a harness of kind `pipeline` is listed,
`create_command` where one of kind `command` is, `create_direct` where one of kind `direct` is. Where it has
`warm_up()`, an env host calls that once, before its first episode: the place for slow imports.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from openforge.sandbox.contract import Sandbox, SandboxLimits
from openforge.sandbox.services import Service


class BadTask(ValueError):
    """A task folder cannot be used; the message names file, field, value and way out."""


class LlmArgs(msgspec.Struct, frozen=True, kw_only=True):
    """How the agent reaches the policy. `api_key` is this attempt's own, short-lived key."""

    base_url: str
    api_key: str
    model: str
    temperature: float
    top_p: float
    max_tokens: int
    stop: tuple[str, ...] = ()


class EnvCallResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one pipeline episode says of itself.

    `reward` is a claim, trained only where the run trusts it; normally None, since the verifier
    scores. `status` `censored` means that something broke that the policy cannot cause; `cause` names it.
    `metrics` come into the verdict as `env_<name>`: finite numbers, the first 64 of them.
    """

    status: Literal["finished", "gave_up", "out_of_turns", "out_of_context", "agent_crashed", "censored"]
    reward: float | None = None
    cause: str = ""
    metrics: dict[str, float] = {}


class PipelineEnv(Protocol):
    """Owns the whole episode: sets up, runs the real harness against `llm_args`, returns."""

    async def run(self, *, instruction: str, llm_args: LlmArgs, **config: Any) -> EnvCallResult: ...


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one reply: a text for each of its tool calls, or one text where it has none.

    `done` ends the episode, and then nothing is shown; `reward` is a claim, as in `EnvCallResult`.
    """

    observations: tuple[str, ...] = ()
    done: bool = False
    reward: float | None = None
    metrics: dict[str, float] = {}


class DirectEnv(Protocol):
    """Is stepped by our own ReAct loop (`openforge.env.react`), turn by turn, in an env host.

    Messages and `tools` are those of Chat Completions. What a model wrote runs in the sandbox only.
    """

    tools: Sequence[Mapping[str, Any]]

    async def reset(self, instruction: str) -> Sequence[Mapping[str, Any]]:
        """The first messages."""
        ...

    async def step(self, reply: Mapping[str, Any]) -> Step:
        """Act on the assistant's message."""
        ...


class CommandAgent(msgspec.Struct, frozen=True, kw_only=True):
    """A harness as a program inside the sandbox: `files` are put there first, then `argv` runs in `cwd`.

    `binds` are host folders that the program needs, shown read-only (an interpreter, a package folder).
    """

    argv: tuple[str, ...]
    env: dict[str, str] = {}
    cwd: str = "/workspace"
    files: dict[str, bytes] = {}
    binds: dict[str, str] = {}


class RewardRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the number that the checks print becomes the reward.

    `binary`: 1 from `pass_threshold` on, else 0. `float`: the number itself. No work at all earns no more
    than `floor`.
    """

    kind: Literal["binary", "float"] = "binary"
    pass_threshold: float = 1.0
    floor: float = 0.0


class TaskInstance(msgspec.Struct, frozen=True, kw_only=True):
    """One drawn task: files are path -> content relative to their root, executables by mode.

    `workspace` is unpacked at `/workspace` before the agent starts; `tests` and `reference` never reach the agent's
    sandbox. The verifier unpacks the artifacts at `/workspace` of a second box, `tests` at `/tests`,
    runs `verify` there and reads one JSON object `{"reward": number, ...}` from the last line of its
    standard output. No `verify` means that only the environment itself can say what the reward is.
    `limits` are those of the boxes that checks and reference run in. `services` run in the agent's box and are
    healthy before the agent starts; `service_files` lie at `/tmp/services` there. `collect` is run in the agent's box
    when the agent has ended and its services have not: what it writes below `/workspace` is part of the work. With
    `transcript` the checks find the recorded conversation at `/tests/transcript.json`.
    """

    task: str
    seed: int
    split: Literal["train", "heldout"]
    instruction: str
    workspace: Mapping[str, "TaskFile"]
    tests: Mapping[str, "TaskFile"]
    reference: str
    verify: tuple[str, ...]
    verify_timeout_s: float = 20.0
    artifacts: tuple[str, ...] = ("/workspace",)
    tags: tuple[str, ...] = ()
    digest: str = ""
    reward: RewardRule = RewardRule()
    limits: SandboxLimits = SandboxLimits()
    services: tuple[Service, ...] = ()
    service_files: Mapping[str, "TaskFile"] = {}
    collect: tuple[str, ...] = ()
    transcript: bool = False


SERVICES_FOLDER = "/tmp/services"


class TaskFile(msgspec.Struct, frozen=True, kw_only=True):
    content: bytes
    mode: int = 0o644


class TaskTemplate(Protocol):
    """A kind of task that yields any number of instances; the same seed yields the same instance.

    One with `fixed = True` has the same instance for every seed and split: a folder of somebody's benchmark.
    """

    id: str

    def draw(self, seed: int, split: Literal["train", "heldout"]) -> TaskInstance: ...


HarnessKind = Literal["command", "pipeline", "direct"]


class EnvironmentModule(Protocol):
    """What `env.py` offers. `HARNESSES` says which harnesses it can host, and how."""

    HARNESSES: Mapping[str, HarnessKind]

    def tasks(self) -> Sequence[TaskTemplate]: ...

    def create_env(self, sandbox: Sandbox, *, harness: str, **options: Any) -> PipelineEnv: ...

    def create_direct(self, sandbox: Sandbox, *, harness: str, **options: Any) -> DirectEnv: ...

    def create_command(self, *, harness: str, instruction: str, llm_args: LlmArgs, **options: Any) -> CommandAgent: ...


def generator(task: str, seed: int, split: str) -> random.Random:
    """The only source of randomness of a draw."""
    return random.Random(f"{task}/{split}/{seed}")

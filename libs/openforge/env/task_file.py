"""`task.yaml`: what a task folder says of its task.

Promises: what was read here is complete and consistent; an error names file, field, value and way out.
"""

import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import msgspec
import yaml

from openforge.env.contract import BadTask, RewardRule
from openforge.env.variables import BadVariables, Variable, WordList, check_variables, check_words
from openforge.sandbox.services import Service, wrong_with

__all__ = ["SCHEMA_VERSION", "BadTask", "TaskSpec", "read_task_file", "read_words", "read_yaml"]

SCHEMA_VERSION = 1

T = TypeVar("T")

_TASK_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class LimitsSection(_Section, frozen=True, kw_only=True):
    memory_mb: int = 512
    pids: int = 128
    disk_mb: int = 64
    cpus: float = 1.0


class VerifierSection(_Section, frozen=True, kw_only=True):
    """`command` runs in a second box that holds `artifacts` of the agent's box and `tests/` at /tests.

    With `transcript` the recorded conversation lies at /tests/transcript.json. `collect` runs in the agent's box when
    the agent has ended, while its services are still up.
    """

    command: tuple[str, ...]
    timeout_s: float = 20.0
    artifacts: tuple[str, ...] = ("/workspace",)
    transcript: bool = False
    collect: tuple[str, ...] = ()


class TaskSpec(_Section, frozen=True, kw_only=True):
    """`task.yaml`. Without `verifier` only the environment itself can say what the reward is."""

    schema_version: int
    task_id: str
    instruction: str
    limits: LimitsSection = LimitsSection()
    verifier: VerifierSection | None = None
    reward: RewardRule = RewardRule()
    services: tuple[Service, ...] = ()
    tags: tuple[str, ...] = ()
    words: dict[str, WordList] = {}
    variables: dict[str, Variable] = {}
    raw: tuple[str, ...] = ()


def read_task_file(file: Path, shared_words: Mapping[str, WordList]) -> TaskSpec:
    """`task.yaml` with the shared word lists merged into its own; raises `BadTask`."""
    read = read_yaml(file)
    if isinstance(read, Mapping):
        _convert_each(file, "words", read.get("words"), WordList)
        _convert_each(file, "variables", read.get("variables"), Variable)
    spec = _convert(file, read, TaskSpec)
    words = {**shared_words, **spec.words}
    _check(file, spec, words)
    return msgspec.structs.replace(spec, words=words)


def read_words(file: Path) -> dict[str, WordList]:
    """The shared word lists, none where there is no such file; raises `BadTask`."""
    if not file.is_file():
        return {}
    read = read_yaml(file)
    _convert_each(file, "", read, WordList)
    words = _convert(file, read, dict[str, WordList])
    try:
        check_words(words)
    except BadVariables as error:
        raise BadTask(f"{file}: {str(error).removeprefix('words.')}") from error
    return words


def _check(file: Path, spec: TaskSpec, words: Mapping[str, WordList]) -> None:
    for wrong in _wrong(spec):
        raise BadTask(f"{file}: {wrong}")
    try:
        check_words(spec.words)
        check_variables(spec.variables, words)
    except BadVariables as error:
        raise BadTask(f"{file}: {error}") from error


def _wrong(spec: TaskSpec) -> list[str]:
    """What the types cannot say, in sentences."""
    wrong = []
    if spec.schema_version != SCHEMA_VERSION:
        wrong.append(f"schema_version = {spec.schema_version}: this version of OpenForge reads {SCHEMA_VERSION}")
    if not _TASK_ID.fullmatch(spec.task_id):
        wrong.append(f"task_id = {spec.task_id!r}: use 1 to 128 of A-Z a-z 0-9 _ -")
    if not spec.instruction.strip():
        wrong.append("instruction is empty: say what the agent should do")
    if spec.verifier is not None:
        wrong += _wrong_verifier(spec.verifier)
    wrong += _wrong_services(spec.services)
    return wrong


def _wrong_services(services: tuple[Service, ...]) -> list[str]:
    wrong = [f"services.{service.name}.{what}" for service in services for what in wrong_with(service)]
    names = [service.name for service in services]
    wrong += [f"services has two named {name!r}: rename one" for name in dict.fromkeys(names) if names.count(name) > 1]
    wrong += [f"services has the name {name!r}: use A-Z a-z 0-9 _ -" for name in names if not _TASK_ID.fullmatch(name)]
    return wrong


def _wrong_verifier(verifier: VerifierSection) -> list[str]:
    wrong = []
    if not verifier.command:
        wrong.append("verifier.command is empty: name the program that prints the reward")
    if verifier.timeout_s <= 0:
        wrong.append(f"verifier.timeout_s = {verifier.timeout_s}: use more than 0 seconds")
    for path in verifier.artifacts:
        if ".." in PurePosixPath(path).parts or not PurePosixPath(path).is_relative_to("/workspace"):
            wrong.append(f"verifier.artifacts has {path!r}: name /workspace or paths below it")
    return wrong


def read_yaml(file: Path) -> object:
    """Raises `BadTask`."""
    try:
        return yaml.load(file.read_bytes(), Loader=_Loader)
    except yaml.YAMLError as error:
        raise BadTask(f"{file} is no YAML: {' '.join(str(error).split())}") from error
    except OSError as error:
        raise BadTask(f"{file} cannot be read: {error.strerror}") from error


def _convert(file: Path, value: object, to: type[T], within: str = "") -> T:
    try:
        return msgspec.convert(value, to)
    except msgspec.ValidationError as error:
        raise BadTask(f"{file}: {_sentence(str(error), value, within)}") from error


def _convert_each(file: Path, field: str, value: object, to: type[msgspec.Struct]) -> None:
    """Entry by entry, since msgspec's messages do not name the key of a mapping."""
    if isinstance(value, Mapping):
        for name, entry in value.items():
            _convert(file, entry, to, within=f"{field}.{name}".lstrip("."))


def _sentence(message: str, value: object, within: str) -> str:
    """msgspec's message with the field in front and the value beside it."""
    what, _, path = message.partition(" - at `$")
    inner = path.rstrip("`").lstrip(".")
    field = ".".join(part for part in (within, inner) if part)
    if not field:
        return what
    return f"{field} = {_value_at(value, inner)!r}: {what[0].lower()}{what[1:]}"


def _value_at(value: Any, field: str) -> Any:
    for part in re.findall(r"[^.\[\]]+", field):
        if isinstance(value, Mapping):
            value = value.get(part)
        elif isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
    return value

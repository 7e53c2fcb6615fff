"""Finds environments by name or path, and tasks within them.

Promises: a name that is not there is an error that lists what is; an environment that lacks a part of
its contract is refused before anything runs; drawing the same reference twice gives the same instance.
"""

import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Hashable, Sequence
from functools import cache, lru_cache
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, cast, get_type_hints

import msgspec

from openforge.env.contract import BadTask, EnvironmentModule, TaskInstance, TaskTemplate
from openforge.env.foreign import refused_as
from openforge.protos import TaskRef

ENTRY_POINTS = "openforge.envs"
PACKAGE = "openforge_envs"

_NEEDED_BY_KIND = {"pipeline": "create_env", "command": "create_command", "direct": "create_direct"}
_GIVEN = ("sandbox", "harness", "instruction", "llm_args")  # what is no option


class NoSuchEnvironment(LookupError):
    """Nothing goes by that name or lies at that path."""


class BadEnvironment(ValueError):
    """What was found does not keep the contract of `openforge.env.contract.EnvironmentModule`."""


class NoSuchTask(LookupError):
    """The environment has no template with that id."""


def load_environment(name_or_path: str) -> EnvironmentModule:
    """The module of an environment: an installed name, or the path of an `env.py` or of its folder.

    Raises `NoSuchEnvironment` or `BadEnvironment`.
    """
    with refused_as(BadEnvironment, f"environment = {name_or_path!r} cannot be loaded", NoSuchEnvironment):
        module = _from_path(Path(name_or_path)) if _is_path(name_or_path) else _from_name(name_or_path)
    _check(name_or_path, module)
    return cast(EnvironmentModule, module)


def environments() -> list[str]:
    """The names of all environments that can be loaded here."""
    entries = {entry.name for entry in importlib.metadata.entry_points(group=ENTRY_POINTS)}
    return sorted(entries | set(_packaged()))


def select(module: EnvironmentModule, ids: Sequence[str]) -> list[TaskTemplate]:
    """The templates with these ids in that order, all of them where `ids` is empty.

    Raises `NoSuchTask`, `BadEnvironment` or `BadTask`.
    """
    templates = _templates(module)
    if not ids:
        return list(templates.values())
    return [_template(module, task) for task in ids]


def options_of(module: EnvironmentModule, harness: str) -> dict[str, Any] | None:
    """Name and type of each option that the environment takes for a harness; None where it takes any (`**options`)."""
    kind = module.HARNESSES[harness]
    create = getattr(module, "OPTIONS_OF", {}).get(harness) or getattr(module, _NEEDED_BY_KIND[kind])
    parameters = inspect.signature(create).parameters.values()
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters):
        return None
    try:
        types = get_type_hints(create, include_extras=True)
    except Exception:  # what the author imports for type checkers alone, or misspelt: no reason not to run
        types = {}
    names = [one.name for one in parameters if one.name not in _GIVEN]
    of_our_loop = {"turns": Annotated[int, msgspec.Meta(ge=0)]} if kind == "direct" else {}
    return {name: types.get(name, Any) for name in names} | of_our_loop


def draw(module: EnvironmentModule, ref: TaskRef) -> TaskInstance:
    """The instance that `ref` names. Members of a group share it."""
    return _draw(cast(Hashable, module), ref)


@lru_cache(maxsize=512)
def _draw(module: Hashable, ref: TaskRef) -> TaskInstance:
    return _template(cast(EnvironmentModule, module), ref.task).draw(ref.seed, ref.split)


def _templates(module: EnvironmentModule) -> dict[str, TaskTemplate]:
    return _templates_by_id(cast(Hashable, module))


@cache
def _templates_by_id(key: Hashable) -> dict[str, TaskTemplate]:
    module = cast(EnvironmentModule, key)
    templates: dict[str, TaskTemplate] = {}
    with refused_as(BadEnvironment, "its tasks() breaks", BadEnvironment, BadTask):
        for template in module.tasks():
            if template.id in templates:
                raise BadEnvironment(f"two tasks have the id {template.id!r}: rename one of them")
            templates[template.id] = template
    if not templates:
        raise BadEnvironment("its tasks() returns none: return at least one task template")
    return templates


def _template(module: EnvironmentModule, task: str) -> TaskTemplate:
    templates = _templates(module)
    if task not in templates:
        raise NoSuchTask(f"task = {task!r} is not in this environment: it has {', '.join(sorted(templates))}")
    return templates[task]


def _is_path(name_or_path: str) -> bool:
    return "/" in name_or_path or name_or_path.endswith(".py")


def _from_path(path: Path) -> ModuleType:
    file = (path / "env.py" if path.is_dir() else path).resolve()
    if not file.is_file():
        raise NoSuchEnvironment(f"environment = {str(path)!r}: there is no file {file}")
    return _load_file(file)


@cache
def _load_file(file: Path) -> ModuleType:
    name = f"openforge_env_{sha256(str(file).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise NoSuchEnvironment(f"environment = {str(file)!r} is no Python file: name an env.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _from_name(name: str) -> ModuleType:
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS, name=name):
        return importlib.import_module(entry.module)
    if name in _packaged():
        return importlib.import_module(f"{PACKAGE}.{name}.env")
    known = ", ".join(environments()) or "none"
    raise NoSuchEnvironment(f"environment = {name!r} is not installed: use one of {known}, or the path of an env.py")


def _packaged() -> list[str]:
    """The environments that lie in the package `openforge_envs`, installed or on the path."""
    try:
        package = importlib.import_module(PACKAGE)
    except ModuleNotFoundError:
        return []
    return [file.parent.name for folder in package.__path__ for file in Path(folder).glob("*/env.py")]


def _check(name: str, module: ModuleType) -> None:
    harnesses = getattr(module, "HARNESSES", None)
    if not isinstance(harnesses, dict) or not harnesses:
        raise BadEnvironment(f"environment {name!r} has no HARNESSES: map each harness name to its kind")
    if not callable(getattr(module, "tasks", None)):
        raise BadEnvironment(f"environment {name!r} has no tasks(): return its task templates")
    for harness, kind in harnesses.items():
        if kind not in list(_NEEDED_BY_KIND):
            kinds = ", ".join(_NEEDED_BY_KIND)
            raise BadEnvironment(f"environment {name!r} lists harness {harness!r} as {kind!r}: use one of {kinds}")
        needed = _NEEDED_BY_KIND[kind]
        if not callable(getattr(module, needed, None)):
            raise BadEnvironment(f"environment {name!r} lists harness {harness!r} as {kind} but has no {needed}()")

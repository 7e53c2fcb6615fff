"""From a TOML file to a `RunConfig`, or to everything that is wrong with it.

Promises: all problems are found at once, each names the field, the value and the way out; paths in
what comes back are absolute, so any process may read it; the same run always has the same digest.
"""

import difflib
import hashlib
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from openforge.runs.config import RunConfig
from openforge.runs.mismatch import example, mismatch, shown, writable
from openforge.runs.model import BUILTIN
from openforge.runs.rules import environment_problems, leaves, problems_of

_STAND_INS: dict[Any, Any] = {str: "missing", int: 1}


class BadRunFile(ValueError):
    """The run file cannot be used; `problems` holds one sentence for each reason."""

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.source = source
        self.problems = tuple(problems)
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n".join([f"{source}: {count}", *(f"  - {problem}" for problem in problems)]))


def load_run_file(path: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """Read and check a run file; `overrides` are `section.field=value`, later ones win. Raises `BadRunFile`.

    The environment is loaded to check its harness and tasks; whether the model is there is for those who need it.
    """
    file = Path(path)
    said = _read(file)
    problems = [*_apply(overrides, said), *_mismatches("", said, RunConfig)]
    fitting, replaced = _what_fits("", said, RunConfig)
    config = _with_absolute_paths(msgspec.convert(fitting, RunConfig), file.parent)
    for problem in (*problems_of(config), *environment_problems(config)):
        if not any(path in problem for path in replaced):  # that field's problem is told already
            problems.append(problem)
    if problems:
        raise BadRunFile(str(file), problems)
    return config


def config_of(text: str) -> RunConfig:
    """A config back from its canonical JSON. Raises `BadRunFile` where another release wrote what this one lacks."""
    try:
        said = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise BadRunFile("submitted run", [f"its config is no JSON: {error}"]) from error
    if problems := list(_mismatches("", said, RunConfig)):
        raise BadRunFile("submitted run", problems)
    return msgspec.convert(said, RunConfig)


def canonical(config: RunConfig) -> tuple[str, str]:
    """The config as JSON with sorted keys, and the sha256 of that in hex."""
    text = msgspec.json.encode(config, order="sorted")
    return text.decode(), hashlib.sha256(text).hexdigest()


def differing(one: RunConfig, other: RunConfig) -> list[str]:
    """The dotted names of all fields in which two configs differ, with both values."""
    left, right = dict(leaves("", msgspec.to_builtins(one))), dict(leaves("", msgspec.to_builtins(other)))
    return [
        f"{name}: {shown(left.get(name, 'absent'))} -> {shown(right.get(name, 'absent'))}"
        for name in sorted(left.keys() | right.keys())
        if left.get(name) != right.get(name)
    ]


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_bytes().decode("utf-8-sig"))
    except FileNotFoundError as error:
        raise BadRunFile(str(file), ["there is no such file: name an existing run file"]) from error
    except OSError as error:
        raise BadRunFile(str(file), [f"it cannot be read ({error.strerror}): name a readable TOML file"]) from error
    except UnicodeDecodeError as error:
        raise BadRunFile(str(file), [f"byte {error.start} is not UTF-8: save the file as UTF-8"]) from error
    except tomllib.TOMLDecodeError as error:
        raise BadRunFile(str(file), [f"it is not TOML: {error}. Mend that line"]) from error
    except (ValueError, RecursionError) as error:
        problem = f"it holds a number or a nesting that nobody can read ({error}): write what a run can use"
        raise BadRunFile(str(file), [problem]) from error


def _apply(overrides: Sequence[str], said: dict[str, Any]) -> Iterator[str]:
    for override in overrides:
        name, equals, text = override.partition("=")
        steps = name.strip().split(".")
        if not equals or len(steps) < 2 or not all(steps):
            yield f"--set {override}: write section.field=value, for example --set run.steps=5"
            continue
        here = said
        for step in steps[:-1]:
            inner = here.setdefault(step, {})
            if not isinstance(inner, dict):
                yield f"--set {override}: {step} is a value, not a section"
                break
            here = inner
        else:
            here[steps[-1]] = _override_value(name.strip(), text.strip())


def _override_value(name: str, text: str) -> Any:
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        value = text  # an unquoted word is text: nobody wants to quote twice in a shell
    if name == "model.path" and isinstance(value, str) and writable(value) and not value.startswith(BUILTIN):
        return str(Path(value).expanduser().absolute())  # typed in a shell, so relative to where that shell is
    return value


def _what_fits(path: str, said: Any, wanted: type[msgspec.Struct]) -> tuple[dict[str, Any], list[str]]:
    """What of it can be converted, and the names of the fields that defaults and stand-ins had to replace."""
    values = said if isinstance(said, dict) else {}
    fitting: dict[str, Any] = {}
    replaced: list[str] = []
    for field in msgspec.structs.fields(wanted):
        name = f"{path}.{field.encode_name}" if path else field.encode_name
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            fitting[field.encode_name], inner = _what_fits(name, values.get(field.encode_name), field.type)
            replaced += inner
        elif field.encode_name in values and not list(mismatch(name, values[field.encode_name], field.type)):
            fitting[field.encode_name] = values[field.encode_name]
        elif field.required or field.encode_name in values:
            replaced.append(name)
            if field.required:
                fitting[field.encode_name] = _STAND_INS[field.type]
    return fitting, replaced


def _mismatches(path: str, said: Any, wanted: Any) -> Iterator[str]:
    if typing.get_origin(wanted) is dict and isinstance(said, dict):
        for name, value in said.items():  # msgspec's message would not name the key
            yield from _mismatches(f"{path}.{name}", value, typing.get_args(wanted)[1])
    elif not (isinstance(wanted, type) and issubclass(wanted, msgspec.Struct)):
        yield from mismatch(path, said, wanted)
    elif not isinstance(said, dict):
        yield f"{path} = {shown(said)} is a value, but {path} is a section: write [{path}] and its fields below it"
    else:
        yield from _section_mismatches(path, said, wanted)


def _section_mismatches(path: str, said: Mapping[str, Any], wanted: type[msgspec.Struct]) -> Iterator[str]:
    fields = {field.encode_name: field for field in msgspec.structs.fields(wanted)}
    prefix = f"{path}." if path else ""
    for name, value in said.items():
        if name in fields:
            yield from _mismatches(prefix + name, value, fields[name].type)
        else:
            yield f"{prefix}{name} = {shown(value)}: {_unknown(name, list(fields), path)}"
    for name, field in fields.items():
        if not field.required or name in said:
            continue
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield f"[{prefix}{name}] is missing: add the section with {_required(field.type)}"
        else:
            yield f"{prefix}{name} is missing: write {name} = {example(field.type)} under [{path}]"


def _required(section: type[msgspec.Struct]) -> str:
    return ", ".join(field.encode_name for field in msgspec.structs.fields(section) if field.required)


def _unknown(name: str, known: list[str], path: str) -> str:
    what = "field" if path else "section"
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f"there is no such {what}; did you mean {close[0]}?"
    return f"there is no such {what}; {'[' + path + ']' if path else 'a run file'} knows {', '.join(known)}"


def _with_absolute_paths(config: RunConfig, folder: Path) -> RunConfig:
    model, environment = config.model, config.environment
    if model.path and not model.path.startswith(BUILTIN):
        model = msgspec.structs.replace(model, path=_absolute(model.path, folder))
    if environment.name.endswith(".py") or "/" in environment.name:
        environment = msgspec.structs.replace(environment, name=_absolute(environment.name, folder))
    return msgspec.structs.replace(config, model=model, environment=environment)


def _absolute(path: str, folder: Path) -> str:
    return str((folder / Path(path).expanduser()).resolve())

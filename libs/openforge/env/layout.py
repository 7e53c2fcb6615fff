"""Tasks on disk: one folder per task, the OpenForge task layout.

    words.yaml                word lists that the tasks beside it share (optional)
    shared/tests/...          checks that the tasks beside it share; environment/ likewise (optional)
    rename/task.yaml          what the task is
    rename/environment/...    what stands in /workspace when the agent begins
    rename/tests/...          the checks, at /tests of the verifier's box only
    rename/services/...       programs of the task's services, at /tmp/services of the agent's box (optional)
    rename/solution/solve.sh  a reference: run in /workspace, it does the task
    rename/template.py        draw(rng, split) -> dict, more variables (optional)

Instruction, files, file names, solution and command may hold `{{name}}` of a variable, except in the files
that `raw` lists. Promises: a folder that loads can be drawn for both splits; the same seed yields the same
instance and digest on every machine; an error names file, field, value and way out.
"""

import importlib.util
import random
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import cast

import msgspec

from openforge.env.contract import TaskFile, TaskInstance, generator
from openforge.env.digest import with_digest
from openforge.env.foreign import refused_as
from openforge.env.placeholders import UnknownVariable, Variables, fill, fill_bytes
from openforge.env.task_file import BadTask, TaskSpec, read_task_file, read_words
from openforge.env.variables import BadVariables, Split, WordList, draw_variables
from openforge.sandbox.contract import SandboxLimits
from openforge.sandbox.services import Service

__all__ = ["BadTask", "FolderTask", "load_task", "load_tasks"]


class FolderTask:
    """A task template that lies in a folder."""

    def __init__(self, folder: Path, spec: TaskSpec, shared: Path | None = None) -> None:
        self.folder = folder
        self.spec = spec
        self.shared = shared or folder
        self.id = spec.task_id

    def draw(self, seed: int, split: Split) -> TaskInstance:
        """The instance of that seed; raises `BadTask`."""
        rng = generator(self.id, seed, split)
        variables = self._variables(rng, split)
        spec, verifier = self.spec, self.spec.verifier
        instance = TaskInstance(
            task=self.id,
            seed=seed,
            split=split,
            instruction=self._fill("task.yaml", "instruction", spec.instruction, variables).strip(),
            workspace=self._files("environment", variables),
            tests=self._files("tests", variables),
            reference=self._reference(variables),
            verify=self._words("verifier.command", verifier.command, variables) if verifier else (),
            verify_timeout_s=verifier.timeout_s if verifier else 0.0,
            artifacts=verifier.artifacts if verifier else (),
            tags=spec.tags,
            reward=spec.reward,
            limits=msgspec.convert(msgspec.structs.asdict(spec.limits), SandboxLimits),
            services=tuple(self._service(service, variables) for service in spec.services),
            service_files=self._files("services", variables) if spec.services else {},
            collect=self._words("verifier.collect", verifier.collect, variables) if verifier else (),
            transcript=verifier.transcript if verifier else False,
        )
        self._refuse_lost_checks(instance)
        return with_digest(instance)

    def _refuse_lost_checks(self, instance: TaskInstance) -> None:
        if not instance.tests and any(word.startswith("/tests/") for word in instance.verify):
            raise BadTask(
                f"{self.folder / 'tests'} holds no file, and verifier.command = {list(instance.verify)} looks there: "
                f"write the checks into it, or into {self.shared / 'tests'} for all tasks"
            )

    def _variables(self, rng: random.Random, split: Split) -> dict[str, str]:
        try:
            drawn = draw_variables(self.spec.variables, self.spec.words, rng, split)
        except BadVariables as error:
            raise BadTask(f"{self.folder / 'task.yaml'}: {error}") from error
        if self._template is not None:
            file = self.folder / "template.py"
            with refused_as(BadTask, f"{file}: draw breaks"):
                returned = self._template(rng, split)
            more = _checked_variables(file, returned)
            twice = sorted(drawn.keys() & more.keys())
            if twice:
                raise BadTask(f"{file}: {twice[0]!r} is a variable of task.yaml too: rename one")
            drawn |= more
        return drawn

    @cached_property
    def _template(self) -> Callable[[random.Random, Split], object] | None:
        file = self.folder / "template.py"
        return _load_draw(file) if file.is_file() else None

    @cached_property
    def _contents(self) -> dict[str, TaskFile]:
        """Every file of the folder and the shared ones, as `environment/...` and so on, before filling."""
        return {
            name: file
            for root in (self.shared, self.folder)
            for part in ("environment", "tests", "solution", "services")
            for name, file in read_folder(root, root / part)
        }

    def _files(self, part: str, variables: Variables) -> dict[str, TaskFile]:
        files: dict[str, TaskFile] = {}
        for name, file in self._contents.items():
            if not name.startswith(f"{part}/"):
                continue
            target = self._fill(name, "file name", name.removeprefix(f"{part}/"), variables)
            if target in files or _leaves(target):
                raise BadTask(f"{self.folder / name}: its name becomes {target!r}: use another, within {part}/")
            files[target] = self._rendered(name, file, variables)
        return files

    def _rendered(self, name: str, file: TaskFile, variables: Variables) -> TaskFile:
        if any(fnmatch(name, pattern) for pattern in self.spec.raw):
            return file
        try:
            return TaskFile(content=fill_bytes(file.content, variables), mode=file.mode)
        except UnknownVariable as error:
            raise BadTask(f"{self.folder / name}: {error}; or list the file under raw in task.yaml") from error

    def _reference(self, variables: Variables) -> str:
        name = "solution/solve.sh"
        if name not in self._contents:
            raise BadTask(f"{self.folder / name} is missing: write a script that does the task in /workspace")
        try:
            return self._rendered(name, self._contents[name], variables).content.decode()
        except UnicodeDecodeError as error:
            raise BadTask(f"{self.folder / name} is not UTF-8 text: write a shell script") from error

    def _words(self, field: str, words: tuple[str, ...], variables: Variables) -> tuple[str, ...]:
        return tuple(self._fill("task.yaml", field, part, variables) for part in words)

    def _service(self, service: Service, variables: Variables) -> Service:
        where = f"services.{service.name}"
        return msgspec.structs.replace(
            service,
            command=self._words(f"{where}.command", service.command, variables),
            env={
                name: self._fill("task.yaml", f"{where}.env.{name}", value, variables)
                for name, value in service.env.items()
            },
        )

    def _fill(self, file: str, field: str, text: str, variables: Variables) -> str:
        try:
            return fill(text, variables)
        except UnknownVariable as error:
            raise BadTask(f"{self.folder / file}: {field}: {error}") from error


def load_tasks(folder: Path | str) -> list[FolderTask]:
    """The tasks that lie in the sub-folders of `folder`, by name; raises `BadTask`."""
    folder = Path(folder)
    if not folder.is_dir():
        raise BadTask(f"{folder} is no folder: name the one that holds the task folders")
    words = read_words(folder / "words.yaml")
    tasks = [load_task(file.parent, words, folder / "shared") for file in sorted(folder.glob("*/task.yaml"))]
    if not tasks:
        raise BadTask(f"{folder} holds no task: make one folder for each, with a task.yaml")
    return tasks


def load_task(
    folder: Path, shared_words: Mapping[str, WordList] | None = None, shared: Path | None = None
) -> FolderTask:
    """The task in `folder`, proved to be drawable; raises `BadTask`. A file of its own hides a shared one."""
    task = FolderTask(folder, read_task_file(folder / "task.yaml", shared_words or {}), shared)
    task.draw(0, "train")
    task.draw(0, "heldout")
    return task


def read_folder(task: Path, folder: Path) -> list[tuple[str, TaskFile]]:
    """The files below `folder`, named relative to `task`; raises `BadTask`."""
    files = []
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            raise BadTask(f"{path} is a symbolic link: put a copy of the file there")
        if path.is_file() and "__pycache__" not in path.parts:
            mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
            files.append((path.relative_to(task).as_posix(), TaskFile(content=path.read_bytes(), mode=mode)))
    return files


def _leaves(name: str) -> bool:
    path = PurePosixPath(name)
    return path.is_absolute() or ".." in path.parts or not path.parts


def _load_draw(file: Path) -> Callable[[random.Random, Split], object]:
    spec = importlib.util.spec_from_file_location(f"openforge_template_{file.parent.name}", file)
    if spec is None or spec.loader is None:
        raise BadTask(f"{file} cannot be loaded: write a Python file")
    module = importlib.util.module_from_spec(spec)
    with refused_as(BadTask, f"{file} cannot be loaded"):
        spec.loader.exec_module(module)
    draw = getattr(module, "draw", None)
    if not callable(draw):
        raise BadTask(f"{file} has no draw: define draw(rng, split) -> dict of variables")
    return cast(Callable[[random.Random, Split], object], draw)


def _checked_variables(file: Path, drawn: object) -> dict[str, str]:
    if not isinstance(drawn, dict):
        raise BadTask(f"{file}: draw returned {type(drawn).__name__}: return a dict of variables")
    for name, value in drawn.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise BadTask(f"{file}: draw returned the name {name!r}: use letters, digits and _")
        if not isinstance(value, str | int | float):
            raise BadTask(f"{file}: draw returned {name} = {value!r}: use a text or a number")
    return {name: str(value) for name, value in drawn.items()}

"""Task folders of Harbor and Terminal-Bench: `task.toml`, `instruction.md`, `environment/`, `tests/`, `solution/`.

    from openforge.env.harbor import load_harbor_tasks
    def tasks(): return load_harbor_tasks(Path(__file__).parent / "tasks")

Promises: tasks are verified as Harbor's `separate` mode does, in a box of their own that holds `/tests` and the work,
whatever mode they ask for: no reward file that an agent wrote is ever read. What cannot be kept without building an
image is refused with one sentence. The working folder is `/workspace` and logs lie in `/tmp/logs`, since a sandbox of
the process driver has no other writable folders: both names are replaced in the task's texts. `allow_internet` and the
network modes are not followed: an agent reaches the model, a check reaches nothing. Rewards: Harbor 0.26, `reward.json`
before `reward.txt`; of several rewards the one named `reward`.
"""

import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, cast

from openforge.env.contract import RewardRule, TaskFile, TaskInstance
from openforge.env.digest import with_digest
from openforge.env.layout import read_folder
from openforge.env.task_file import BadTask
from openforge.env.variables import Split
from openforge.sandbox.contract import SandboxLimits

WORK, LOGS = "/workspace", "/tmp/logs"
_UNSUPPORTED = {
    "steps": "a task of several steps",
    "environment.mcp_servers": "MCP servers",
    "environment.healthcheck": "a health check of the environment",
    "environment.gpus": "GPUs",
    "verifier.collect": "commands that collect",
    "verifier.environment": "an environment of the verifier's own",
}
_READ_REWARD = """
import json, math, pathlib
folder = pathlib.Path("/tmp/logs/verifier")
try:
    said = json.loads((folder / "reward.json").read_text())
except FileNotFoundError:
    said = {"reward": float((folder / "reward.txt").read_text())}
if len(said) == 1:
    said = {"reward": next(iter(said.values()))}
print(json.dumps(said))
"""
_VERIFY = (
    f"mkdir -p {LOGS}/verifier {LOGS}/agent {LOGS}/artifacts; cd {WORK}; bash /tests/test.sh >{LOGS}/out.txt 2>&1; "
    f"tail -c 2000 {LOGS}/out.txt >&2; exec python3 -I -S -c {shlex.quote(_READ_REWARD)}"
)


class HarborTask:
    """One folder. Fixed: every seed and split draws the same instance, so train on it or evaluate with it, not both."""

    fixed = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.id = re.sub(r"[^A-Za-z0-9_-]", "_", folder.name)[:128]
        said = _read(folder / "task.toml")
        _refuse_unsupported(folder, said)
        self._workspace, self._workdir = _built(folder, said)
        self._said = said

    def draw(self, seed: int, split: Split) -> TaskInstance:
        environment, verifier = self._section("environment"), self._section("verifier")
        return with_digest(
            TaskInstance(
                task=self.id,
                seed=seed,
                split=split,
                instruction=self._text("instruction.md").strip(),
                workspace={name: self._moved(file) for name, file in self._workspace.items()},
                tests={name: self._moved(file) for name, file in self._files("tests")},
                reference=self._solution(),
                verify=("/bin/bash", "-c", _VERIFY),
                verify_timeout_s=float(verifier.get("timeout_sec", 600.0)),
                reward=RewardRule(kind="binary"),
                limits=SandboxLimits(
                    memory_mb=int(environment.get("memory_mb", 512)),
                    disk_mb=min(int(environment.get("storage_mb", 64)), 256),
                    cpus=float(environment.get("cpus", 1)),
                ),
                tags=tuple(self._section("task").get("keywords", ())),
            )
        )

    def _section(self, name: str) -> Mapping[str, Any]:
        return cast(Mapping[str, Any], self._said.get(name, {}))

    def _files(self, part: str) -> Iterator[tuple[str, TaskFile]]:
        for name, file in read_folder(self.folder, self.folder / part):
            yield name.removeprefix(f"{part}/"), file

    def _text(self, name: str) -> str:
        path = self.folder / name
        try:
            return self._moved(TaskFile(content=path.read_bytes())).content.decode()
        except FileNotFoundError as error:
            raise BadTask(f"{path} is missing: a Harbor task has one") from error

    def _solution(self) -> str:
        """`solve.sh` with the files that lie beside it, run where the agent works."""
        others = [(name, file) for name, file in self._files("solution") if name != "solve.sh"]
        if others:
            raise BadTask(
                f"{self.folder / 'solution' / others[0][0]}: only solution/solve.sh is run here: put it in there"
            )
        return f"cd {WORK}\n{self._text('solution/solve.sh')}"

    def _moved(self, file: TaskFile) -> TaskFile:
        """With the folders of a sandbox in place of the image's. Bytes that are no UTF-8 stay as they are."""
        try:
            text = file.content.decode()
        except UnicodeDecodeError:
            return file
        for old, new in ((self._workdir, WORK), ("/logs", LOGS)):
            text = re.sub(rf"(?<![\w./~-]){re.escape(old)}(?![\w.-])", new, text)
        return TaskFile(content=text.encode(), mode=file.mode)


def load_harbor_tasks(folder: Path | str) -> list[HarborTask]:
    """The tasks in the sub-folders of `folder`, by name; raises `BadTask`."""
    tasks = [HarborTask(file.parent) for file in sorted(Path(folder).glob("*/task.toml"))]
    if not tasks:
        raise BadTask(f"{folder} holds no Harbor task: make one folder for each, with a task.toml")
    for task in tasks:
        task.draw(0, "train")
    return tasks


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadTask(f"{file} is no TOML file that can be read: {error}") from error


def _refuse_unsupported(folder: Path, said: Mapping[str, Any]) -> None:
    for field, what in _UNSUPPORTED.items():
        section, _, name = field.rpartition(".")
        value = (said.get(section, {}) if section else said).get(name)
        if value:
            raise BadTask(f"{folder / 'task.toml'}: {field} = {value!r}: {what} cannot be kept here; remove it")
    artifacts: Sequence[Any] = said.get("artifacts", ())
    for artifact in artifacts:
        raise BadTask(
            f"{folder / 'task.toml'}: artifacts has {artifact!r}: the whole working folder is handed over, nothing else"
        )


def _built(folder: Path, said: Mapping[str, Any]) -> tuple[dict[str, TaskFile], str]:
    """What the Dockerfile puts into the working folder, and that folder's name; raises `BadTask`."""
    workdir = str(said.get("environment", {}).get("workdir") or "")
    files: dict[str, TaskFile] = {}
    dockerfile = folder / "environment" / "Dockerfile"
    if (folder / "environment" / "docker-compose.yaml").exists():
        raise BadTask(f"{folder / 'environment'}: several containers cannot be kept here: write one Dockerfile")
    here = dict(read_folder(folder / "environment", folder / "environment"))
    for line in _lines(dockerfile):
        verb, _, rest = line.partition(" ")
        match verb.upper():
            case "FROM" | "LABEL" | "CMD" | "ENTRYPOINT":
                continue
            case "WORKDIR":
                workdir = workdir or rest.strip()
            case "COPY":
                files |= _copied(dockerfile, line, shlex.split(rest), here, workdir or "/app")
            case _:
                raise BadTask(f"{dockerfile}: {line!r} needs an image to be built: FROM, WORKDIR and COPY are followed")
    return files, workdir or "/app"


def _lines(dockerfile: Path) -> list[str]:
    if not dockerfile.is_file():
        return []
    text = dockerfile.read_text().replace("\\\n", " ")
    return [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]


def _copied(
    dockerfile: Path, line: str, words: Sequence[str], here: Mapping[str, TaskFile], workdir: str
) -> dict[str, TaskFile]:
    *sources, destination = words
    target = PurePosixPath(workdir, destination)
    if any(word.startswith("--") for word in words) or not sources or not target.is_relative_to(workdir):
        raise BadTask(f"{dockerfile}: {line!r}: copy files of environment/ into {workdir}, without options")
    below = target.relative_to(workdir)
    into = destination.endswith(("/", ".")) or len(sources) > 1 or target == PurePosixPath(workdir)
    copied: dict[str, TaskFile] = {}
    for source in sources:
        name = PurePosixPath(source)
        if str(name) in here:
            copied[str(below / name.name if into else below)] = here[str(name)]
            continue
        inside = {path: file for path, file in here.items() if PurePosixPath(path).is_relative_to(name)}
        if not inside:
            raise BadTask(f"{dockerfile}: {line!r}: there is no {source} in environment/")
        copied |= {str(below / PurePosixPath(path).relative_to(name)): file for path, file in inside.items()}
    return {path: file for path, file in copied.items() if path != "Dockerfile"}

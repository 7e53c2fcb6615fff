"""Tasks in parquet: raw rows (what to do, how it is verified) and rollout rows (raw, and how it is to be run).

    from openforge.env.rollouts import load_rollout_tasks
    def tasks(): return load_rollout_tasks(Path(__file__).parent / "rollouts.parquet")

Promises: training and evaluation draw from the same file, training from rows of split `train`, evaluation from those of
`heldout`, which share no instance; the same rows give the same bytes and digests; unknown columns are kept; a column
that is missing, a row that cannot be a task, and whatever looks like a key refuse the file with one sentence.

Raw columns: `task_id`, `domain`, `split`, `prompt` (a text, or a list of {role, content}, whose texts are joined),
`task` (JSON: `workspace`, name -> text, and `reference`, a script that does the task), `verifier` (JSON: `tests`,
name -> text; `command`; `timeout_s`; `pass_threshold`). Rollout columns beside them: those of `Rollout`, and
`task_digest`.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import pyarrow
from pyarrow import parquet

from openforge.env.contract import RewardRule, TaskFile, TaskInstance
from openforge.env.digest import with_digest
from openforge.env.task_file import BadTask
from openforge.env.variables import Split
from openforge.sandbox.contract import SandboxLimits

SCHEMA_VERSION = 1

T = TypeVar("T")

RAW = ("task_id", "domain", "split", "prompt", "task", "verifier")
_TASK_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
_KEY = re.compile(r"\b(?:sk-|of-|ghp_|xoxb-|AKIA)[A-Za-z0-9_-]{16,}|\"(?:api_?key|secret)\"\s*:\s*\"[^\"]+\"")


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """How every row of a file is to be run: the same for training and evaluation."""

    env_class: Literal["command", "pipeline", "direct"]
    env_module: str
    env_config: str = "{}"
    harness: str
    memory_mb: int = 512
    pids: int = 128
    disk_mb: int = 64
    cpus: float = 1.0
    episode_timeout_s: float = 120.0
    max_steps: int = 10
    llm_args: str = "{}"
    schema_version: int = SCHEMA_VERSION


class _Work(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    workspace: dict[str, str] = {}
    reference: str


class _Verifier(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    command: tuple[str, ...]
    tests: dict[str, str] = {}
    timeout_s: float = 20.0
    pass_threshold: float = 1.0


def convert(raw: Path, out: Path, rollout: Rollout) -> int:
    """Write `out` from the rows of `raw`, and say how many; raises `BadTask`."""
    rows = _rows(raw, RAW)
    added = msgspec.structs.asdict(rollout)
    limits = _limits(added)
    made = [row | added | {"task_digest": _instance(raw, n, row, limits).digest} for n, row in enumerate(rows)]
    for n, row in enumerate(made):
        _refuse_keys(raw, n, row)
    scratch = out.with_suffix(".tmp")
    parquet.write_table(pyarrow.Table.from_pylist(made), scratch)
    scratch.replace(out)
    return len(made)


class RowsTask:
    """The rows of one domain: a seed draws one of those of its split, and neighbouring seeds draw different ones."""

    def __init__(self, file: Path, domain: str, rows: Mapping[Split, Sequence[TaskInstance]]) -> None:
        self.id = domain
        self._file = file
        self._rows = rows

    def draw(self, seed: int, split: Split) -> TaskInstance:
        rows = self._rows.get(split, ())
        if not rows:
            raise BadTask(f"{self._file}: domain {self.id!r} has no row of split {split!r}: add some")
        row = rows[(seed // 2) % len(rows)]  # the scheduler gives even seeds to training, odd ones to evaluation
        return with_digest(msgspec.structs.replace(row, task=self.id, seed=seed, split=split))


def load_rollout_tasks(file: Path | str) -> list[RowsTask]:
    """A template for each domain, by name; raises `BadTask`."""
    file = Path(file)
    domains: dict[str, dict[Split, list[TaskInstance]]] = {}
    for n, row in enumerate(_rows(file, (*RAW, *Rollout.__struct_fields__, "task_digest"))):
        _refuse_keys(file, n, row)
        if row["schema_version"] != SCHEMA_VERSION:
            raise BadTask(f"{file}: row {n}: schema_version = {row['schema_version']}: this reads {SCHEMA_VERSION}")
        instance = _instance(file, n, row, _limits(row))
        if instance.digest != row["task_digest"]:
            raise BadTask(
                f"{file}: row {n}: task {row['task_id']!r} is not what its task_digest says: convert it again"
            )
        domains.setdefault(row["domain"], {}).setdefault(row["split"], []).append(instance)
    return [RowsTask(file, domain, rows) for domain, rows in sorted(domains.items())]


def _rows(file: Path, needed: Sequence[str]) -> list[dict[str, Any]]:
    try:
        table = parquet.read_table(file)
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise BadTask(f"{file} is no parquet file that can be read: {error}") from error
    missing = [name for name in needed if name not in table.column_names]
    if missing:
        raise BadTask(f"{file} lacks the columns {', '.join(missing)}: it has {', '.join(table.column_names)}")
    rows: list[dict[str, Any]] = table.to_pylist()
    if not rows:
        raise BadTask(f"{file} has no row: write at least one task")
    for task_id, times in Counter(row["task_id"] for row in rows).items():
        if times > 1:
            raise BadTask(f"{file} has task_id {task_id!r} twice: rename one")
    return rows


def _instance(file: Path, n: int, row: Mapping[str, Any], limits: SandboxLimits) -> TaskInstance:
    for name in ("task_id", "domain"):
        if not isinstance(row[name], str) or not _TASK_ID.fullmatch(row[name]):
            raise BadTask(f"{file}: row {n}: {name} = {row[name]!r}: use 1 to 128 of A-Z a-z 0-9 _ -")
    if row["split"] not in ("train", "heldout"):
        raise BadTask(f"{file}: row {n}: split = {row['split']!r}: use train or heldout")
    work, verifier = _json(file, n, row, "task", _Work), _json(file, n, row, "verifier", _Verifier)
    return with_digest(
        TaskInstance(
            task=row["task_id"],
            seed=0,
            split=row["split"],
            instruction=_prompt(row["prompt"]),
            workspace=_files(work.workspace),
            tests=_files(verifier.tests),
            reference=work.reference,
            verify=verifier.command,
            verify_timeout_s=verifier.timeout_s,
            reward=RewardRule(pass_threshold=verifier.pass_threshold),
            limits=limits,
        )
    )


def _json(file: Path, n: int, row: Mapping[str, Any], column: str, to: type[T]) -> T:
    try:
        return msgspec.json.decode(row[column], type=to)
    except (msgspec.DecodeError, TypeError) as error:
        raise BadTask(f"{file}: row {n}: {column} cannot be read: {error}") from error


def _prompt(prompt: str | Sequence[Mapping[str, str]]) -> str:
    return prompt if isinstance(prompt, str) else "\n\n".join(message["content"] for message in prompt)


def _files(texts: Mapping[str, str]) -> dict[str, TaskFile]:
    return {name: TaskFile(content=text.encode()) for name, text in texts.items()}


def _limits(row: Mapping[str, Any]) -> SandboxLimits:
    return SandboxLimits(**{name: row[name] for name in ("memory_mb", "pids", "disk_mb", "cpus")})


def _refuse_keys(file: Path, n: int, row: Mapping[str, Any]) -> None:
    for column in _with_keys(row):
        raise BadTask(f"{file}: row {n}: {column} holds what looks like a key: keys come from the environment")


def _with_keys(row: Mapping[str, Any]) -> Iterator[str]:
    return (name for name, value in row.items() if isinstance(value, str) and _KEY.search(value))

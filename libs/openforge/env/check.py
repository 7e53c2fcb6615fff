"""Proves that tasks can be trained on: `python -m openforge.env.check NAME`.

Promises: a task that passes was really done by its reference and scored by its checks, in boxes like those
of a run; every problem is one sentence.
"""

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from openforge.endpoint import Address, BadEndpoint, Endpoint
from openforge.env.contract import EnvironmentModule, TaskInstance, TaskTemplate
from openforge.env.digest import digest_of
from openforge.env.judge import EndpointJudge, Judge, JudgeFailed
from openforge.env.registry import BadEnvironment, NoSuchEnvironment, NoSuchTask, load_environment, select
from openforge.env.task_file import BadTask
from openforge.env.variables import Split
from openforge.env.verdict import Broke, Scored
from openforge.env.verify import Checker, Work, passed
from openforge.sandbox.contract import SandboxDriver

SPLITS: tuple[Split, ...] = ("train", "heldout")
_DRAWS_COMPARED = 64


TRICKS = r"""
mkdir -p logs/verifier bin /tmp/logs/verifier
for folder in . logs/verifier /tmp /tmp/logs/verifier; do
  echo 1 > $folder/reward.txt; echo '{"reward": 1}' > $folder/reward.json
done
printf '#!/bin/sh\necho "{\\"reward\\": 1}"\nexit 0\n' > bin/python3; chmod +x bin/python3
for program in python3 bash sh pytest diff cmp test grep; do cp bin/python3 $program; done
for module in json math pathlib sys os conftest sitecustomize usercustomize; do
  echo 'print(chr(123) + chr(34) + "reward" + chr(34) + ": 1}"); raise SystemExit(0)' > $module.py
done
exit 0
"""
"""Run by `sh` in the workspace: it earns nothing where the checks believe nothing that lies there."""


class TaskReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was proved of one task. `verify_s` is the mean wall clock of one verification."""

    task: str
    instances: int
    problems: tuple[str, ...]
    verify_s: float

    @property
    def ok(self) -> bool:
        return not self.problems


async def check_task(
    driver: SandboxDriver, template: TaskTemplate, seeds: Sequence[int], judge: Judge | None = None
) -> TaskReport:
    """The reference passes, no work and no trick does, verdicts repeat, draws are deterministic, held-out differs."""
    if is_fixed(template):
        seeds = seeds[:1]
    problems = [*_problems_of_drawing(template, seeds)]
    walls_s: list[float] = []
    with tempfile.TemporaryDirectory(prefix="openforge-check-") as scratch:
        checker = Checker(driver, Path(scratch))
        for split in SPLITS:
            for seed in seeds:
                found, spent_s = await _check_instance(checker, template.draw(seed, split), judge)
                problems += [f"{split} seed {seed}: {problem}" for problem in found]
                walls_s += spent_s
    return TaskReport(
        task=template.id,
        instances=len(SPLITS) * len(seeds),
        problems=tuple(problems),
        verify_s=sum(walls_s) / max(len(walls_s), 1),
    )


async def check_environment(
    driver: SandboxDriver,
    module: EnvironmentModule,
    tasks: Sequence[str],
    seeds: Sequence[int],
    *,
    judge: Judge | None = None,
    at_once: int = 2,
) -> list[TaskReport]:
    """One report for each of the tasks (all of them where `tasks` is empty), in their order."""
    slots = asyncio.Semaphore(at_once)

    async def one(template: TaskTemplate) -> TaskReport:
        async with slots:
            return await check_task(driver, template, seeds, judge)

    return list(await asyncio.gather(*(one(template) for template in select(module, tasks))))


def digests_in_another_process(name: str, tasks: Sequence[str], seeds: Sequence[int]) -> list[str]:
    """The digests that a fresh interpreter with another hash seed draws."""
    argv = [sys.executable, "-m", "openforge.env.check", name, "--digests", "--seeds", str(len(seeds))]
    env_argv = [*argv, *(["--tasks", ",".join(tasks)] if tasks else [])]
    done = subprocess.run(env_argv, capture_output=True, text=True, check=False, env=_other_hash_seed())
    if done.returncode:
        raise BadEnvironment(f"environment {name!r} does not load in a fresh process: {done.stderr.strip()[-300:]}")
    return done.stdout.split()


def digests(module: EnvironmentModule, tasks: Sequence[str], seeds: Sequence[int]) -> list[str]:
    """`task/split/seed=digest` of every instance."""
    return [
        f"{template.id}/{split}/{seed}={template.draw(seed, split).digest}"
        for template in select(module, tasks)
        for split in SPLITS
        for seed in seeds
    ]


async def _check_instance(
    checker: Checker, instance: TaskInstance, judge: Judge | None
) -> tuple[list[str], list[float]]:
    """Problems, and the wall clock of each verification."""
    if not instance.verify:
        return ["it has no checks, so only the environment itself can say what the reward is"], []
    try:
        return await _check_with(_Judged(checker, judge), instance)
    except JudgeFailed as error:
        return [f"nothing can be said of it: {error}"], []


class _Judged:
    """A checker whose checks may ask `judge`."""

    def __init__(self, checker: Checker, judge: Judge | None) -> None:
        self.work = checker.work
        self._checker = checker
        self._judge = judge

    async def score(self, instance: TaskInstance, work: Work, *, name: str) -> Scored | Broke:
        return await self._checker.score(instance, work, name=name, judge=self._judge)


async def _check_with(checker: _Judged, instance: TaskInstance) -> tuple[list[str], list[float]]:
    name = f"check-{instance.task}-{instance.split}-{instance.seed}"[:100]
    work = await checker.work(instance, instance.reference, name=f"{name}-ref")
    if isinstance(work, Broke):
        return [f"the reference fails: {work.why}"], []
    began = time.monotonic()
    first = await checker.score(instance, work, name=f"{name}-1")
    second = await checker.score(instance, work, name=f"{name}-2")
    spent_s = (time.monotonic() - began) / 2
    problems = [*_problems_of_reference(instance, first), *_problems_of_repeating(first, second)]
    problems += await _problems_of_idleness(checker, instance, name)
    problems += await _problems_of_tricks(checker, instance, name)
    return problems, [spent_s]


def _problems_of_reference(instance: TaskInstance, outcome: Scored | Broke) -> Iterator[str]:
    if isinstance(outcome, Broke):
        yield f"on the reference {outcome.why}"
    elif not passed(outcome, instance):
        score, threshold = outcome.metrics["score"], instance.reward.pass_threshold
        yield f"the reference earns {score:g}, which is less than pass_threshold {threshold:g}"


def _problems_of_repeating(first: Scored | Broke, second: Scored | Broke) -> Iterator[str]:
    verdicts = [(outcome.reward, outcome.metrics) for outcome in (first, second) if isinstance(outcome, Scored)]
    if len(verdicts) == 1 or (verdicts and verdicts[0] != verdicts[1]):
        yield f"the same work is judged differently: {_told(first)}, then {_told(second)}"


async def _problems_of_idleness(checker: _Judged, instance: TaskInstance, name: str) -> list[str]:
    nothing = await checker.work(instance, "true", name=f"{name}-idle")
    outcome = nothing if isinstance(nothing, Broke) else await checker.score(instance, nothing, name=f"{name}-3")
    if isinstance(outcome, Broke):
        return [f"on no work at all {outcome.why}: the checks should print a reward"]
    if outcome.reward > instance.reward.floor:
        return [f"no work at all earns {outcome.reward:g}, which is more than reward.floor {instance.reward.floor:g}"]
    return []


async def _problems_of_tricks(checker: _Judged, instance: TaskInstance, name: str) -> list[str]:
    """What an agent may try that does not do the task: verdicts written beforehand, programs that shadow others."""
    tried = await checker.work(instance, TRICKS, name=f"{name}-tricks")
    outcome = tried if isinstance(tried, Broke) else await checker.score(instance, tried, name=f"{name}-4")
    if isinstance(outcome, Scored) and outcome.reward > instance.reward.floor:
        return [f"planted files earn {outcome.reward:g} without the task: the checks believe what lies in the work"]
    return []


def is_fixed(template: TaskTemplate) -> bool:
    return bool(getattr(template, "fixed", False))


def _problems_of_drawing(template: TaskTemplate, seeds: Sequence[int]) -> Iterator[str]:
    for split in SPLITS:
        for seed in seeds:
            once, twice = template.draw(seed, split), template.draw(seed, split)
            if once != twice:
                yield f"{split} seed {seed}: two draws differ: use no randomness but that of the seed"
            if once.digest != digest_of(once):
                yield f"{split} seed {seed}: its digest is not that of its content: end the draw with with_digest"
    if is_fixed(template):
        return
    trained = {_content(template.draw(seed, "train")) for seed in range(_DRAWS_COMPARED)}
    if any(_content(template.draw(seed, "heldout")) in trained for seed in range(_DRAWS_COMPARED)):
        yield "a held-out instance is also a training instance: draw its names from words of its own"


def _content(instance: TaskInstance) -> str:
    """The same for instances that differ in nothing but their seed."""
    return digest_of(msgspec.structs.replace(instance, seed=0, split="train"))


def _told(outcome: Scored | Broke) -> str:
    return outcome.why if isinstance(outcome, Broke) else f"{outcome.metrics['score']:g}"


def _other_hash_seed() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)}


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    tasks = [task for task in options.tasks.split(",") if task]
    seeds = list(range(options.seeds))
    try:
        module = load_environment(options.environment)
        if options.digests:
            print("\n".join(digests(module, tasks, seeds)))
            return 0
        return asyncio.run(_report(options, module, tasks, seeds))
    except (NoSuchEnvironment, BadEnvironment, NoSuchTask, BadTask, BadEndpoint) as error:
        print(f"openforge: {error}", file=sys.stderr)
        return 2


async def _report(
    options: argparse.Namespace, module: EnvironmentModule, tasks: Sequence[str], seeds: Sequence[int]
) -> int:
    from openforge.sandbox.process import ProcessDriver

    name: str = options.environment
    with tempfile.TemporaryDirectory(prefix="openforge-check-") as state:
        driver = ProcessDriver(Path(state), proxy_socket=None, owner="check", allow_reduced=True)
        try:
            async with _judge(options) as judge:
                reports = await check_environment(driver, module, tasks, seeds, judge=judge)
        finally:
            await driver.close()
    elsewhere = await asyncio.to_thread(digests_in_another_process, name, tasks, seeds)
    differing = [here for here, there in zip(digests(module, tasks, seeds), elsewhere, strict=True) if here != there]
    problems = [f"{one.split('=')[0]} is drawn differently in another process" for one in differing]
    _show(reports, problems, options.json)
    return 0 if all(report.ok for report in reports) and not problems else 1


@asynccontextmanager
async def _judge(options: argparse.Namespace) -> AsyncIterator[Judge | None]:
    if not options.judge_url:
        yield None
        return
    address = Address(section="judge", url=options.judge_url, model=options.judge_model, key_env=options.judge_key_env)
    async with Endpoint(address) as endpoint:
        await endpoint.check()
        yield EndpointJudge(endpoint, max_tokens=1024)


def _show(reports: Sequence[TaskReport], problems: Sequence[str], as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode({"tasks": reports, "problems": problems}).decode())
        return
    for report in reports:
        mark = "ok  " if report.ok else "FAIL"
        print(f"{mark} {report.task}  {report.instances} instances, {report.verify_s * 1000:.0f} ms a verification")
        for problem in report.problems:
            print(f"     {problem}")
    for problem in problems:
        print(f"FAIL {problem}")


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="openforge.env.check", description=__doc__)
    parser.add_argument("environment", help="an installed environment, or the path of an env.py")
    parser.add_argument("--tasks", default="", help="ids, separated by commas; all tasks where it is left out")
    parser.add_argument("--seeds", type=int, default=3, help="how many instances of each split (3)")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--judge-url", default="", help="the endpoint that checks may ask")
    parser.add_argument("--judge-model", default="", help="its model")
    parser.add_argument("--judge-key-env", default="", help="the environment variable that holds its key")
    parser.add_argument("--digests", action="store_true", help="print the digests of the instances, check nothing")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())

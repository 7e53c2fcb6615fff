"""What the checks of a task said: one JSON object on the last line of their standard output.

Promises: only a finite number is a reward; whatever else the checks print, or however they end, is
`Broke` with a sentence and never a number, or a question to a judge. Two verdicts are none: one of them may be that of
a program of the work's, which the checks started and which shares their output.
"""

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from openforge.env.contract import RewardRule
from openforge.env.judge import JudgeFailed
from openforge.sandbox.contract import ExecResult

_MOST_METRICS = 64
_LONGEST_NAME = 64
_VERDICTS = {"reward", "ask", "judge_failed"}


class Scored(msgspec.Struct, frozen=True, kw_only=True):
    """The checks ran and printed a number. `metrics` has it as `score`, and all else they counted."""

    reward: float
    metrics: dict[str, float] = {}
    wall_s: float = 0.0


class Broke(msgspec.Struct, frozen=True, kw_only=True):
    """The checks crashed, hung or printed no valid reward."""

    why: str
    wall_s: float = 0.0


class Asks(msgspec.Struct, frozen=True, kw_only=True):
    """The checks want a judge's answers first: a list of messages for each question."""

    questions: dict[str, list[dict[str, Any]]]


def read_verdict(result: ExecResult, rule: RewardRule) -> Scored | Broke | Asks:
    """What the checks' end and output mean; raises `JudgeFailed` where they say that a judge did."""
    why = _how_it_failed(result)
    if why:
        return Broke(why=f"{why}{_said(result.stderr)}", wall_s=result.wall_s)
    printed = _last_object(result.stdout)
    if isinstance(printed, str):
        return Broke(why=f"{printed}{_said(result.stderr)}", wall_s=result.wall_s)
    if "judge_failed" in printed:
        raise JudgeFailed(_short(printed["judge_failed"]))
    if "ask" in printed:
        return _asks(printed["ask"], result.wall_s)
    score = number(printed.get("reward"))
    if score is None:
        return Broke(why=f"the checks printed reward = {_short(printed.get('reward'))}", wall_s=result.wall_s)
    return Scored(reward=reward_of(score, rule), metrics=_metrics(printed, score, rule), wall_s=result.wall_s)


def reward_of(score: float, rule: RewardRule) -> float:
    """The reward that `rule` makes of what the checks printed."""
    if rule.kind == "binary":
        return 1.0 if score >= rule.pass_threshold else 0.0
    return score


def number(value: object) -> float | None:
    """`value` as a finite float; None for anything else, true and false included."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        converted = float(value)
    except OverflowError:
        return None
    return converted if math.isfinite(converted) else None


def _how_it_failed(result: ExecResult) -> str:
    if result.timed_out:
        return f"the checks did not end within {result.wall_s:.0f} s"
    if result.exit_code != 0:
        memory = ", out of memory" if result.out_of_memory else ""
        return f"the checks ended with exit code {result.exit_code}{memory}"
    if result.truncated:
        return "the checks printed more than can be kept"
    return ""


def _last_object(stdout: bytes) -> dict[str, object] | str:
    lines = [line for line in stdout.splitlines() if line.strip()]
    if not lines:
        return "the checks printed nothing"
    try:
        printed = msgspec.json.decode(lines[-1])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        printed = None
    if not isinstance(printed, dict):
        return f"the last line that the checks printed is no JSON object: {_short(lines[-1])}"
    if any(_is_verdict(line) for line in lines[:-1]):
        return "the checks printed more than one verdict: give the programs of the work an output of their own"
    return printed


def _asks(asked: object, wall_s: float) -> Asks | Broke:
    try:
        return Asks(questions=msgspec.convert(asked, dict[str, list[dict[str, Any]]]))
    except msgspec.ValidationError as error:
        return Broke(why=f"the checks ask what is no list of messages: {error}", wall_s=wall_s)


def _is_verdict(line: bytes) -> bool:
    if not line.lstrip().startswith(b"{"):
        return False
    try:
        printed = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return isinstance(printed, dict) and not _VERDICTS.isdisjoint(printed)


def counted(said: Mapping[str, object]) -> dict[str, float]:
    """What of it is a finite number under a name of at most 64 characters: the first 64 of those."""
    numbers = {
        name: converted
        for name, value in said.items()
        if len(name) <= _LONGEST_NAME and (converted := number(value)) is not None
    }
    return dict(list(numbers.items())[:_MOST_METRICS])


def _metrics(printed: dict[str, object], score: float, rule: RewardRule) -> dict[str, float]:
    kept = counted({name: value for name, value in printed.items() if name != "reward"})
    return {**kept, "score": score, "passed": float(score >= rule.pass_threshold)}


def _said(stderr: bytes) -> str:
    lines = stderr.decode(errors="replace").strip().splitlines()
    return f": {lines[-1][:200]}" if lines else ""


def _short(value: object) -> str:
    return repr(value)[:300]

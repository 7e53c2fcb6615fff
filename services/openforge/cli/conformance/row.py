"""One line of the table: what a harness did in a run, and whether it is as it should be.

Promises: `ok` only where the job was done, every token is accounted for, the log-probs are true, the sequences read
as the conversation, and every break of a branch is one that the table of harnesses knows.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from openforge.cli.conformance.line import Fault, plan_for
from openforge.cli.conformance.truth import Reading, unaccounted, worst_difference
from openforge.harnesses import Harness, find
from openforge.harnesses.harness import Habits
from openforge.protos import (
    Caller,
    EpisodeEnded,
    EpisodeFailed,
    EpisodeRequested,
    EpisodeSealed,
    Fact,
    TrajectoryVerified,
    TurnRecorded,
)

TOLERANCE = 1e-3
_EXPLAINED = {"abandoned", "aborted", "orphaned", "superseded", "ambiguous", "late"}


class Evidence(msgspec.Struct, kw_only=True):
    """What the streams say of one episode's only attempt."""

    requested: EpisodeRequested
    ended: EpisodeEnded | None = None
    sealed: EpisodeSealed | None = None
    failed: EpisodeFailed | None = None
    verified: TrajectoryVerified | None = None
    turns: list[TurnRecorded] = []


class Row(msgspec.Struct, kw_only=True):
    """`prompt_tokens` is the longest prompt, `breaks` the branches beside the first by cause, `agent_s` the time
    from the harness's start to its end. `faults`: how often each struck, empty in a run without."""

    harness: str
    version: str
    dialect: str
    scenario: str = "plain"
    calls: int = 0
    branches: int = 0
    sequences: int = 0
    delivered_fraction: float = 0.0
    logprob_max_diff: float | None = None
    ok: bool = False
    note: str = ""
    breaks: dict[str, int] = {}
    sub_agent_calls: int = 0
    dropped: dict[str, int] = {}
    faults: dict[str, int] = {}
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    agent_s: float = 0.0


def gathered(facts: Sequence[Fact]) -> list[Evidence]:
    """The facts of a run, by episode, in the order of request."""
    found = {fact.episode: Evidence(requested=fact) for fact in facts if isinstance(fact, EpisodeRequested)}
    for fact in facts:
        match fact:
            case EpisodeEnded():
                found[fact.episode].ended = fact
            case EpisodeSealed():
                found[fact.episode].sealed = fact
            case EpisodeFailed():
                found[fact.episode].failed = fact
            case TrajectoryVerified():
                found[fact.episode].verified = fact
            case TurnRecorded():
                found[fact.episode].turns.append(fact)
    return list(found.values())


def row_of(evidence: Evidence, reading: Reading, weights: Path, struck: Counter[Fault]) -> Row:
    """The line for one episode; it takes a forward pass of each sequence."""
    requested = evidence.requested
    if requested.task.env == "conformance":
        name, _, scenario = requested.task.task.rpartition("_")
        harness: Harness | None = find(name)
    else:
        harness, scenario = None, "real"
    row = Row(
        harness=harness.name if harness else requested.harness,
        version=harness.version if harness else "-",
        dialect=harness.dialect if harness else "chat",
        scenario=scenario,
        calls=len(evidence.turns),
        faults={fault.value: struck[fault] for fault in Fault if fault is not Fault.NONE and struck[fault]},
    )
    if evidence.ended is not None:
        row.agent_s = round(evidence.ended.agent_s, 1)
    trajectory = evidence.verified
    if trajectory is None:
        row.note = _why_none(evidence)
        return row
    row.breaks = {cause.value: count for cause, count in trajectory.breaks.items()}
    row.sub_agent_calls = sum(turn.caller is Caller.SUB_AGENT for turn in evidence.turns)
    row.branches = 1 + sum(row.breaks.values())
    row.sequences = len(trajectory.sequences)
    row.delivered_fraction = trajectory.delivered_fraction
    row.dropped = {entry.reason: entry.tokens for entry in trajectory.dropped}
    row.sampled_tokens = trajectory.sampled_tokens
    row.prompt_tokens = max((len(sequence.ids) // 4 for sequence in trajectory.sequences), default=0)
    row.logprob_max_diff = worst_difference(weights, trajectory)
    complaints = [
        *_complaints(harness, row, evidence),
        *unaccounted(trajectory, evidence.turns),
        *reading.misread(trajectory, evidence.turns),
    ]
    row.ok = not complaints
    row.note = "; ".join(complaints) or _known(harness, row)
    return row


def _known(harness: Harness | None, row: Row) -> str:
    """What the table of harnesses says of this one."""
    if harness is None or row.scenario == "real":
        return ""
    if row.scenario == "faults":
        return f"not struck by {', '.join(sorted(harness.fatal))}, at which it gives up" if harness.fatal else ""
    return habits_of(harness, row.scenario).why


def habits_of(harness: Harness, scenario: str) -> Habits:
    return harness.more.get(scenario, harness.habits)


def _why_none(evidence: Evidence) -> str:
    ended = evidence.ended
    why = f"{evidence.failed.reason}: {evidence.failed.detail}" if evidence.failed else "no verdict"
    tail = f"; it ended with {ended.exit_code}, saying {ended.log_tail[-300:]!r}" if ended else ""
    return why + tail


def _complaints(harness: Harness | None, row: Row, evidence: Evidence) -> Iterator[str]:
    if evidence.sealed is not None and evidence.sealed.engine_failures:
        yield f"{evidence.sealed.engine_failures} calls had no answer"
    if row.logprob_max_diff is None or not row.logprob_max_diff <= TOLERANCE:
        yield f"a log-prob is off by {row.logprob_max_diff}"
    if harness is None or row.scenario == "real":
        return
    yield from _undone(evidence)
    if row.scenario == "faults":
        yield from _fault_complaints(harness, row)
    else:
        yield from _habit_complaints(habits_of(harness, row.scenario), row)


def _undone(evidence: Evidence) -> Iterator[str]:
    assert evidence.verified is not None
    assert evidence.ended is not None
    if evidence.verified.reward != 1.0:
        yield f"the job was not done ({evidence.ended.reason}, exit code {evidence.ended.exit_code})"
    elif evidence.ended.exit_code:
        yield f"it ended with exit code {evidence.ended.exit_code}"


def _habit_complaints(habits: Habits, row: Row) -> Iterator[str]:
    if row.delivered_fraction != 1.0:
        yield f"dropped: {row.dropped}"
    if row.sequences != row.branches:
        yield f"{row.branches} branches became {row.sequences} sequences"
    if row.breaks != dict(habits.breaks):
        yield f"breaks {row.breaks}, known are {dict(habits.breaks)}"
    if row.sub_agent_calls != habits.sub_agent_calls:
        yield f"{row.sub_agent_calls} calls are a sub-agent's, known are {habits.sub_agent_calls}"


def _fault_complaints(harness: Harness, row: Row) -> Iterator[str]:
    if unexplained := set(row.dropped) - _EXPLAINED:
        yield f"tokens were dropped as {', '.join(sorted(unexplained))}"
    planned = {fault.value for fault in plan_for(harness)} - {Fault.NONE.value}
    if missed := sorted(planned - set(row.faults)):
        yield f"never struck by {', '.join(missed)}"

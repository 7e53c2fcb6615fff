"""One readable line for each fact."""

from datetime import datetime

from openforge.bus import Told
from openforge.protos import (
    BatchTrained,
    EngineMeasured,
    EpisodeEnded,
    EpisodeFailed,
    EpisodeRequested,
    EpisodeSealed,
    EpisodeStarted,
    Fact,
    GroupClosed,
    GroupOpened,
    PolicyPublished,
    PolicyServed,
    RunPaused,
    RunStopped,
    RunSubmitted,
    TrajectoryRetired,
    TrajectoryVerified,
    TurnRecorded,
    count,
)


def line(told: Told[Fact], *, with_run: bool = False) -> str:
    """When, what, about whom, and what is worth knowing of it."""
    clock = datetime.fromtimestamp(told.at).strftime("%H:%M:%S.%f")[:-3]
    run = f"{told.fact.run}  " if with_run else ""
    return f"{clock}  {run}{type(told.fact).__name__:<19}{said(told.fact)}".rstrip()


def said(fact: Fact) -> str:
    match fact:
        case RunSubmitted() | RunPaused():
            return f"generation {fact.generation}"
        case RunStopped():
            return f"generation {fact.generation}: {fact.reason}{_because(fact.detail)}"
        case GroupOpened():
            task = f"{fact.task.env}/{fact.task.task} seed {fact.task.seed}"
            return f"{fact.group}: {fact.size} x {task} at version {fact.start_version} ({fact.purpose})"
        case GroupClosed():
            failed = sum(member.failed is not None for member in fact.members)
            return f"{fact.group}: {len(fact.members) - failed} verdicts, {failed} failed"
        case TurnRecorded():
            return _turn(fact)
        case TrajectoryVerified():
            return (
                f"{_attempt(fact.episode, fact.attempt)}: reward {fact.reward:g}, {fact.ended}, {fact.turns} turns, "
                f"{fact.sampled_tokens} tokens in {len(fact.sequences)} sequences"
            )
        case EpisodeRequested() | EpisodeStarted() | EpisodeEnded() | EpisodeSealed() | EpisodeFailed():
            return f"{_attempt(fact.episode, fact.attempt)}: {_episode(fact)}"
        case _:
            return _policy(fact)


def _episode(fact: Fact) -> str:
    match fact:
        case EpisodeRequested():
            return f"{fact.harness} at {fact.task.env}/{fact.task.task} ({fact.env_kind})"
        case EpisodeStarted():
            return f"by {fact.manager} in {fact.sandbox} ({fact.isolation} isolation)"
        case EpisodeEnded():
            return f"{fact.reason} after {fact.agent_s:.1f} s{_because(fact.detail)}"
        case EpisodeSealed():
            refused = f", {fact.refused} calls refused" if fact.refused else ""
            unanswered = f", {fact.unanswered} calls unanswered" if fact.unanswered else ""
            return f"{len(fact.turns)} turns{refused}{unanswered}"
        case EpisodeFailed():
            return f"{fact.reason}{_because(fact.detail)}"
        case _:
            return ""


def _policy(fact: Fact) -> str:
    match fact:
        case BatchTrained():
            return (
                f"v{fact.version}: {len(fact.episodes)} episodes of {len(fact.groups)} groups, reward "
                f"{fact.reward_mean:.3f}, lag {fact.lag}, {fact.loss_tokens} tokens in {fact.step_s:.1f} s"
            )
        case TrajectoryRetired():
            return f"{fact.episode}: {fact.reason} at version {fact.version}{_because(fact.detail)}"
        case PolicyPublished():
            return f"v{fact.version}.{fact.incarnation}: {fact.bytes / 1e6:.1f} MB at {fact.location}"
        case EngineMeasured():
            return (
                f"{fact.engine}: {fact.running:.1f} requests run, {fact.waiting:.1f} wait, "
                f"{fact.kv_use:.0%} of the memory for keys and values in use"
            )
        case PolicyServed():
            return f"v{fact.version}.{fact.incarnation}: by {fact.engine}, probe error {fact.probe_error:.1e}"
        case _:
            return " ".join(str(part) for part in fact.key())


def _turn(fact: TurnRecorded) -> str:
    versions = "+".join(f"v{version}" for version in sorted({span.version for span in fact.versions}))
    return (
        f"{_attempt(fact.episode, fact.attempt)} turn {fact.turn}: {fact.prefix}+{count(fact.suffix)} in, "
        f"{fact.sampled_tokens()} out by {versions or _speaker(fact)}, {fact.cause}, {fact.status}"
    )


def _speaker(fact: TurnRecorded) -> str:
    """Who answered where no version did."""
    return fact.engine.model if fact.usage is not None else "nobody"


def _attempt(episode: str, attempt: int) -> str:
    return f"{episode}.{attempt}"


def _because(detail: str) -> str:
    first = detail.strip().splitlines()[0] if detail.strip() else ""
    return f": {first[:120]}" if first else ""

"""Facts as rows for people: one for each attempt, each turn, each training sequence.

Shapes in the columns: `T` tokens of a sequence, of which `K` are trained; token ids are int32, log-probs float32
(natural log, of the distribution that was sampled from).
"""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec
import pyarrow as pa

from openforge.protos import (
    BatchTrained,
    EpisodeEnded,
    EpisodeFailed,
    EpisodeRequested,
    EpisodeStarted,
    Fact,
    Span,
    TrajectoryRetired,
    TrajectoryVerified,
    TurnRecorded,
    VersionSpan,
    unpack_ids,
    unpack_logprobs,
)

Row = dict[str, Any]

_TASK = [("env", pa.string()), ("task", pa.string()), ("seed", pa.int64()), ("split", pa.string())]
_WHOSE = [("run", pa.string()), ("episode", pa.string()), ("attempt", pa.int32())]
_TIME = pa.timestamp("us", tz="UTC")

EPISODES = pa.schema(
    [
        *_WHOSE,
        ("group", pa.string()),
        ("purpose", pa.string()),
        *_TASK,
        ("harness", pa.string()),
        ("requested_at", _TIME),
        ("started_at", _TIME),
        ("ended_at", _TIME),
        ("ended", pa.string()),
        ("exit_code", pa.int32()),
        ("agent_s", pa.float64()),
        ("isolation", pa.string()),
        ("failed", pa.string()),
        ("detail", pa.string()),
        ("verified_at", _TIME),
        ("reward", pa.float64()),
        ("rewarded_by", pa.string()),
        ("metrics", pa.string()),
        ("turns", pa.int32()),
        ("prompt_tokens", pa.int64()),
        ("sampled_tokens", pa.int64()),
        ("delivered_fraction", pa.float64()),
        ("trained_version", pa.int64()),
        ("retired", pa.string()),
    ]
)
TURNS = pa.schema(
    [
        *_WHOSE,
        ("turn", pa.int32()),
        ("parent", pa.int32()),
        ("cause", pa.string()),
        ("prefix", pa.int32()),
        ("suffix_ids", pa.list_(pa.int32())),
        ("sampled_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("versions", pa.list_(pa.int32())),
        ("finish", pa.string()),
        ("status", pa.string()),
        ("temperature", pa.float64()),
        ("kept", pa.int32()),
        ("messages", pa.string()),
        ("reply", pa.string()),
        ("tools", pa.string()),
        ("dialect", pa.string()),
        ("received_at", _TIME),
        ("sampled_s", pa.float64()),
    ]
)
SEQUENCES = pa.schema(
    [
        *_WHOSE,
        ("group", pa.string()),
        ("purpose", pa.string()),
        *_TASK,
        ("harness", pa.string()),
        ("index", pa.int32()),
        ("turns", pa.list_(pa.int32())),
        ("ids", pa.list_(pa.int32())),  # T
        ("loss_positions", pa.list_(pa.int32())),  # K of 0..T-1
        ("logprobs", pa.list_(pa.float32())),  # K
        ("versions", pa.list_(pa.int32())),  # K
        ("temperature", pa.float64()),
        ("reward", pa.float64()),
        ("ended", pa.string()),
    ]
)


def sequence_rows(told: TrajectoryVerified) -> Iterator[Row]:
    shared = _whose(told) | _task(told) | {"harness": told.harness, "temperature": told.temperature}
    shared |= {"reward": told.reward, "ended": str(told.ended)}
    for index, sequence in enumerate(told.sequences):
        positions = _positions(sequence.loss)
        version_at = _versions(sequence.versions)
        yield shared | {
            "index": index,
            "turns": list(sequence.turns),
            "ids": unpack_ids(sequence.ids),
            "loss_positions": positions,
            "logprobs": unpack_logprobs(sequence.logprobs),
            "versions": [version_at.get(position) for position in positions],
        }


def turn_row(told: TurnRecorded) -> Row:
    sampled = unpack_ids(told.sampled)
    version_at = _versions(told.versions)
    return _whose(told) | {
        "turn": told.turn,
        "parent": told.parent,
        "cause": str(told.cause),
        "prefix": told.prefix,
        "suffix_ids": unpack_ids(told.suffix),
        "sampled_ids": sampled,
        "logprobs": unpack_logprobs(told.logprobs),
        "versions": [version_at.get(position) for position in range(len(sampled))],
        "finish": str(told.finish),
        "status": str(told.status),
        "temperature": told.sampling.temperature,
        "kept": told.kept,
        "messages": told.messages.decode(errors="replace"),
        "reply": told.reply.decode(errors="replace"),
        "tools": told.tools.decode(errors="replace"),
        "dialect": told.dialect,
        "received_at": _moment(told.timing.received_at),
        "sampled_s": told.timing.sampled_s,
    }


class Episodes:
    """One row for each attempt: a fold over facts in any order between kinds."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, int], Row] = {}
        self._fates: dict[str, Row] = {}

    def apply(self, fact: Fact, at: float) -> None:
        match fact:
            case EpisodeRequested():
                self._add(fact, _task(fact) | {"harness": fact.harness, "requested_at": _moment(at)})
            case EpisodeStarted():
                self._add(fact, {"started_at": _moment(at), "isolation": fact.isolation})
            case EpisodeEnded():
                ended = {"ended_at": _moment(at), "ended": str(fact.reason), "exit_code": fact.exit_code}
                self._add(fact, ended | {"agent_s": fact.agent_s, "detail": fact.detail})
            case EpisodeFailed():
                failed = {"failed": str(fact.reason), "sampled_tokens": fact.sampled_tokens, "detail": fact.detail}
                self._add(fact, failed)
            case TrajectoryVerified():
                self._add(fact, _verdict(fact) | {"verified_at": _moment(at)})
            case BatchTrained():
                self._fates |= {episode: {"trained_version": fact.version} for episode in fact.episodes}
            case TrajectoryRetired():
                self._fates[fact.episode] = {"retired": str(fact.reason)}

    def rows(self) -> Iterator[Row]:
        """A fate is that of the attempt with the verdict."""
        for (episode, _), row in sorted(self._rows.items()):
            yield row | (self._fates.get(episode, {}) if "verified_at" in row else {})

    def _add(self, fact: Any, known: Row) -> None:
        self._rows.setdefault((fact.episode, fact.attempt), _whose(fact)).update(known)


def _verdict(told: TrajectoryVerified) -> Row:
    names = ("reward", "rewarded_by", "turns", "prompt_tokens", "sampled_tokens", "delivered_fraction", "isolation")
    row = {name: getattr(told, name) for name in names}
    metrics = msgspec.json.encode(told.metrics).decode()
    return row | _task(told) | {"harness": told.harness, "metrics": metrics, "ended": str(told.ended)}


def _whose(fact: Any) -> Row:
    return {"run": fact.run, "episode": fact.episode, "attempt": fact.attempt}


def _task(fact: EpisodeRequested | TrajectoryVerified) -> Row:
    task = msgspec.structs.asdict(fact.task)
    return {"group": fact.group, "purpose": str(fact.purpose), **task}


def _positions(spans: tuple[Span, ...]) -> list[int]:
    return [position for span in spans for position in range(span.start, span.start + span.length)]


def _versions(spans: tuple[VersionSpan, ...]) -> dict[int, int]:
    return {position: span.version for span in spans for position in range(span.start, span.start + span.length)}


def _moment(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)

"""Reads from the bus what is told of an attempt."""

import asyncio
from typing import TypeVar

import msgspec

from openforge.bus import Bus
from openforge.protos import (
    Caller,
    EpisodeEnded,
    EpisodeFailed,
    EpisodeRequested,
    EpisodeSealed,
    Fact,
    TrajectoryVerified,
    TurnRecorded,
    env_token,
)
from openforge.tokens import Conversation
from openforge.verifier.core import Evidence

F = TypeVar("F", bound=Fact)


class NotYetTold(LookupError):
    """A fact that must come before a seal is not there."""


async def evidence_of(bus: Bus, sealed: EpisodeSealed) -> Evidence:
    """Everything about the attempt; raises `NotYetTold`."""
    requested, ended, turns = await asyncio.gather(
        _find(bus, EpisodeRequested, sealed),
        _find(bus, EpisodeEnded, sealed),
        bus.read(TurnRecorded, sealed.run, sealed.episode, sealed.attempt),
    )
    return Evidence(requested=requested, ended=ended, sealed=sealed, turns=tuple(told.fact for told in turns))


async def is_decided(bus: Bus, requested: EpisodeRequested) -> bool:
    """Whether the attempt has a verdict, or failed."""
    run, episode, attempt = requested.run, requested.episode, requested.attempt
    verdicts, failures = await asyncio.gather(
        bus.count(TrajectoryVerified, run, env_token(requested.task.env), requested.harness, episode),
        bus.count(EpisodeFailed, run, episode, attempt),
    )
    return bool(verdicts or failures)


async def work_of(bus: Bus, ended: EpisodeEnded) -> bytes:
    """The tar that the agent left, none where it left nothing."""
    return b"" if ended.artifacts is None else await bus.blobs.get(ended.artifacts)


def transcript_of(conversation: Conversation) -> bytes:
    """The agent's own conversation, as it stood when it ended: the JSON list of its messages."""
    whole: dict[int, list[msgspec.Raw]] = {}
    last: list[msgspec.Raw] = []
    for turn in conversation:
        fact = turn.fact
        earlier = whole[fact.parent][: fact.kept] if fact.parent is not None else []
        new = msgspec.json.decode(fact.messages or b"[]", type=list[msgspec.Raw])
        whole[fact.turn] = [*earlier, *new, msgspec.Raw(fact.reply)]
        if fact.caller is Caller.MAIN:
            last = whole[fact.turn]
    return msgspec.json.encode(last)


async def _find(bus: Bus, fact: type[F], sealed: EpisodeSealed) -> F:
    told = await bus.find(fact, sealed.run, sealed.episode, sealed.attempt)
    if told is None:
        raise NotYetTold(f"{fact.__name__} of episode {sealed.episode}, attempt {sealed.attempt}")
    return told.fact

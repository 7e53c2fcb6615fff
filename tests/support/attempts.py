"""Facts of one attempt, as the services before the verifier tell them."""

import json
from typing import Any

import msgspec

from openforge.protos import (
    BranchCause,
    EndReason,
    EngineIdentity,
    EpisodeEnded,
    EpisodeLimits,
    EpisodeRequested,
    EpisodeSealed,
    FinishReason,
    Sampling,
    TaskRef,
    Timing,
    TurnRecorded,
    TurnStatus,
    VersionSpan,
    pack_ids,
    pack_logprobs,
)

RUN = "r"
TURN_TOKENS = 5
"""Sampled tokens of every turn made here."""


def requested(env: str, task: str, *, episode: str = "g000000-0", attempt: int = 0) -> EpisodeRequested:
    return EpisodeRequested(
        run=RUN,
        episode=episode,
        attempt=attempt,
        group=episode.split("-")[0],
        purpose="train",
        task=TaskRef(env=env, task=task, seed=3),
        harness="agent",
        env_kind="command",
        limits=EpisodeLimits(timeout_s=60.0, turns=4, tokens_per_turn=64),
        seed=1,
    )


def ended(request: EpisodeRequested, reason: EndReason = EndReason.FINISHED, **more: Any) -> EpisodeEnded:
    return EpisodeEnded(run=RUN, episode=request.episode, attempt=request.attempt, reason=reason, **more)


def sealed(request: EpisodeRequested, turns: int, **more: Any) -> EpisodeSealed:
    return EpisodeSealed(run=RUN, episode=request.episode, attempt=request.attempt, turns=tuple(range(turns)), **more)


def conversation(
    request: EpisodeRequested, *replies: dict[str, Any], results: tuple[str, ...] = ()
) -> list[TurnRecorded]:
    """One turn for each reply, each a token for token continuation of the one before."""
    turns: list[TurnRecorded] = []
    prompt = 0
    for number, reply in enumerate(replies):
        messages = [{"role": "user", "content": "Do it in a ```bash block"}]
        if number:
            messages = [{"role": "user", "content": results[number - 1] if number <= len(results) else "ok"}]
        prefix = prompt + TURN_TOKENS if number else 0
        prompt = prefix + 3
        turns.append(_turn(request, number, prefix, json.dumps(messages).encode(), json.dumps(reply).encode()))
    return turns


def _turn(request: EpisodeRequested, number: int, prefix: int, messages: bytes, reply: bytes) -> TurnRecorded:
    return TurnRecorded(
        run=RUN,
        episode=request.episode,
        attempt=request.attempt,
        turn=number,
        parent=number - 1 if number else None,
        cause=BranchCause.CONTINUED if number else BranchCause.START,
        prefix=prefix,
        suffix=pack_ids([number, 1, 2]),
        sampled=pack_ids(range(10, 10 + TURN_TOKENS)),
        logprobs=pack_logprobs([-0.5] * TURN_TOKENS),
        versions=(VersionSpan(0, TURN_TOKENS, 2),),
        finish=FinishReason.STOP,
        status=TurnStatus.DELIVERED,
        sampling=Sampling(temperature=0.7),
        messages=messages,
        reply=reply,
        engine=EngineIdentity(engine="e"),
        timing=Timing(received_at=0.0),
    )


def command(line: str) -> dict[str, Any]:
    """A reply that runs `line`."""
    return {"role": "assistant", "content": f"Now this:\n```bash\n{line}\n```"}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def changed(fact: TurnRecorded, **changes: Any) -> TurnRecorded:
    return msgspec.structs.replace(fact, **changes)

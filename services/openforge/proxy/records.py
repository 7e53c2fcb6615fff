"""What is told of a call: the reply, and the record of its turn.

Promises: a record holds only what its parent turn does not.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from openforge.chat.contract import Message, Renderer, Tool, ToolCall
from openforge.chat.decoding import cut_at_stop
from openforge.chat.dialect import Request
from openforge.protos import EngineIdentity, Sampling, Span, Timing, TurnRecorded, TurnStatus, pack_ids, pack_logprobs
from openforge.proxy.turns import Placement, Sampled


def reply_of(renderer: Renderer, sampled: Sampled, tools: Sequence[Tool], call_id: str) -> Message:
    """The message that the harness is told; its tool calls carry ids that begin with `call_id`."""
    if sampled.said is not None:
        return msgspec.structs.replace(sampled.said, tool_calls=_numbered(sampled.said.tool_calls, call_id))
    parsed = renderer.parse(sampled.ids, tools)
    content, reasoning = parsed.content, parsed.reasoning
    if sampled.stop and sampled.stop != renderer.call_ends:
        content = cut_at_stop(content, [sampled.stop])
        if not content and not parsed.tool_calls:
            reasoning = cut_at_stop(reasoning, [sampled.stop]).rstrip("\n")
    calls = _numbered(parsed.tool_calls, call_id)
    return Message(role="assistant", content=content, reasoning=reasoning, tool_calls=calls)


def _numbered(calls: Sequence[ToolCall], call_id: str) -> tuple[ToolCall, ...]:
    return tuple(msgspec.structs.replace(call, id=f"{call_id}{index}") for index, call in enumerate(calls))


@dataclass(slots=True, frozen=True)
class Asked:
    """What a record says of the call beside its tokens."""

    sampling: Sampling
    asked: bytes
    dialect: str
    engine: EngineIdentity


def turn_fact(
    run: str,
    episode: str,
    attempt: int,
    number: int,
    placement: Placement,
    sampled: Sampled,
    reply: Message,
    asked: Asked,
    status: TurnStatus,
    timing: Timing,
) -> TurnRecorded:
    """The record of a call: only what its parent does not hold."""
    question = placement.question
    return TurnRecorded(
        run=run,
        episode=episode,
        attempt=attempt,
        turn=number,
        parent=placement.parent,
        cause=placement.cause,
        prefix=placement.prefix,
        suffix=placement.suffix,
        sampled=pack_ids(sampled.ids),
        logprobs=pack_logprobs(sampled.logprobs),
        versions=sampled.versions,
        finish=sampled.finish,
        status=status,
        sampling=asked.sampling,
        asked=asked.asked,
        kept=placement.kept,
        messages=msgspec.json.encode(question.messages[placement.kept :]),
        reply=msgspec.json.encode(reply),
        tools=b"" if placement.same_tools else msgspec.json.encode(question.tools),
        dialect=asked.dialect,
        digest=question.digest,
        harness=question.harness,
        engine=asked.engine,
        timing=timing,
        caller=placement.caller,
        usage=sampled.usage,
    )


def images_of(messages: Sequence[Message]) -> tuple[str, ...]:
    """The digests of all images in these messages."""
    return tuple(dict.fromkeys(image.digest for message in messages for image in message.images))


def forced_of(logprobs: Sequence[float]) -> tuple[Span, ...]:
    """The tokens of a guided answer that had no alternative: the log-prob of the only token allowed is exactly 0."""
    spans: list[Span] = []
    for index, logprob in enumerate(logprobs):
        if logprob != 0.0:
            continue
        if spans and spans[-1].start + spans[-1].length == index:
            spans[-1] = Span(spans[-1].start, spans[-1].length + 1)
        else:
            spans.append(Span(index, 1))
    return tuple(spans)


def guided_by(request: Request) -> str:
    """The fields that an answer has to match."""
    tools = request.calls and (request.tool_choice.mode != "auto" or request.tool_choice.names or request.schema)
    return " or ".join(field for field in ("tools" if tools else "", request.schema_at) if field)

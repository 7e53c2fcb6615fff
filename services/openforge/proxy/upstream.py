"""The engine over its wire: one call in, checked pieces of one answer out.

Promises: every piece has a log-prob for each id; an answer that ends has a known version for each id; what is
no answer raises `EngineBroken` where another try may help, `EngineRefused` where it will not.
"""

import math
from collections.abc import AsyncGenerator, Iterator
from urllib.parse import urlsplit

import msgspec

from openforge.bus import BadSettings
from openforge.protos import FinishReason, VersionSpan
from openforge.proxy.posting import Broken, Posting
from openforge.wire.generate import Usage, WeightVersionSpan, WrittenRequest

SENTINEL = -9000.0
"""vLLM gives -9999 for tokens that its own processing masked: no sampled token has that."""

_TRY_AGAIN = frozenset({404, 408, 409, 425, 429})
_DECLINED = frozenset({400, 422})
_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class _Sampled(msgspec.Struct, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Sampled] = []


class _Choice(msgspec.Struct):
    """What is read of a `Choice`."""

    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] = []
    logprobs: _Logprobs | None = None
    weight_versions: list[WeightVersionSpan] | None = None
    routed_experts: str | None = None


class _Chunk(msgspec.Struct):
    """What is read of a `GenerateResponse`; the prompt only as bytes, since it is long and normally as expected."""

    choices: list[_Choice] = []
    usage: Usage | None = None
    prompt_token_ids: msgspec.Raw = msgspec.Raw(b"null")


_CHUNK = msgspec.json.Decoder(_Chunk)
_NO_IDS = b"null"
_ECHO = b'"prompt_token_ids":'
_DATA = b"data: "


class EngineBroken(Exception):
    """The engine is away, overloaded, or broke off: the same call may work later."""


class EngineRefused(Exception):
    """The engine will not answer this call, or answered what cannot be."""


class EngineDeclined(EngineRefused):
    """The call is not one that the engine can answer."""


class Piece(msgspec.Struct, frozen=True):
    """Some ids of an answer. The last piece has `finish`, and `versions` that cover the whole answer.

    `cached_tokens` of the prompt were not computed for it; None where the engine does not say. `routed` is what it says
    of the experts that the tokens went through, as it came.
    """

    ids: list[int]
    logprobs: list[float]
    finish: FinishReason | None = None
    stop: str = ""
    versions: tuple[VersionSpan, ...] = ()
    cached_tokens: int | None = None
    routed: str = ""


class Engine:
    def __init__(self, url: str, silence_s: float) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or not parts.port:
            raise BadSettings(f"OPENFORGE_ENGINE_URL = {url!r} has no host and port: use http://HOST:PORT")
        self._path = parts.path.rstrip("/") + "/inference/v1/generate"
        self._posting = Posting(parts.hostname, parts.port, silence_s)

    async def generate(self, request: WrittenRequest) -> AsyncGenerator[Piece]:
        """The answer as it is sampled. Closing the iterator calls the engine off."""
        reading = _Reading(bytes(request.token_ids))
        try:
            async with self._posting.post(self._path, msgspec.json.encode(request)) as answer:
                if answer.status != 200:
                    _refuse(answer.status, (await answer.read())[:500])
                while (data := await answer.next()) is not None:
                    for piece in reading.read(data):
                        yield piece
        except Broken as error:
            raise EngineBroken(f"the engine broke off: {error}") from error
        if not reading.ended:
            raise EngineBroken("the engine's answer has no end")

    def close(self) -> None:
        self._posting.close()


def _refuse(status: int, body: bytes) -> None:
    said = f"the engine answered {status}: {body.decode(errors='replace')}"
    if status >= 500 or status in _TRY_AGAIN:
        raise EngineBroken(said)
    raise EngineDeclined(said) if status in _DECLINED else EngineRefused(said)


class _Reading:
    """An answer to `prompt`, read as it comes. What comes after its end is passed over."""

    def __init__(self, prompt: bytes) -> None:
        self.ended = False
        self._prompt = prompt
        self._echoed = False
        self._sampled = 0
        self._rest: list[bytes] = []

    def read(self, data: bytes) -> Iterator[Piece]:
        for event in self._events(data):
            if self.ended or event == b"[DONE]":
                continue
            try:
                chunk = _CHUNK.decode(event if self._echoed else self._without_echo(event))
            except msgspec.MsgspecError as error:
                raise EngineBroken(f"the engine sent what is no chunk of an answer: {error}") from error
            if not _same_prompt(bytes(chunk.prompt_token_ids), self._prompt):
                raise EngineRefused("the engine answered another prompt than it was sent")
            for choice in chunk.choices:
                self._sampled += len(choice.token_ids)
                self.ended = self.ended or choice.finish_reason is not None
                yield _piece(choice, self._sampled, chunk.usage)

    def _events(self, data: bytes) -> list[bytes]:
        """The data of each server-sent event that is whole: one line, since JSON has no line feeds."""
        if b"\n" not in data:
            self._rest.append(data)  # an end that tells of experts may be megabytes long
            return []
        data = b"".join((*self._rest, data)) if self._rest else data
        events: list[bytes] = []
        start = 0
        while (end := data.find(b"\n", start)) >= 0:
            if data.startswith(_DATA, start):
                events.append(data[start + len(_DATA) : end].strip())
            start = end + 1
        self._rest = [data[start:]] if start < len(data) else []
        return events

    def _without_echo(self, event: bytes) -> bytes:
        """Normally the engine writes, once, the very bytes that it was sent: to decode them costs most."""
        at = event.find(_ECHO) + len(_ECHO)
        if at < len(_ECHO) or not event.startswith(self._prompt, at):
            return event
        self._echoed = True
        return b"%b%b%b" % (event[:at], _NO_IDS, event[at + len(self._prompt) :])


def _same_prompt(told: bytes, prompt: bytes) -> bool:
    if told == _NO_IDS:
        return True
    try:
        return msgspec.json.decode(told, type=list[int]) == msgspec.json.decode(prompt, type=list[int])
    except msgspec.MsgspecError:
        return False


def _piece(choice: _Choice, sampled: int, usage: Usage | None) -> Piece:
    logprobs = [entry.logprob for entry in choice.logprobs.content] if choice.logprobs else []
    if len(logprobs) != len(choice.token_ids):
        raise EngineRefused(f"the engine sent {len(logprobs)} log-probs for {len(choice.token_ids)} tokens")
    if not math.isfinite(sum(logprobs)) or min(logprobs, default=0.0) <= SENTINEL:
        raise EngineRefused("the engine sent a log-prob that no sampled token has")
    if choice.finish_reason is None:
        return Piece(choice.token_ids, logprobs)
    if choice.finish_reason not in _FINISH:
        raise EngineBroken("the engine called the answer off")
    return Piece(
        choice.token_ids,
        logprobs,
        _FINISH[choice.finish_reason],
        choice.stop_reason if isinstance(choice.stop_reason, str) else "",
        _versions(choice.weight_versions or [], sampled),
        usage.prompt_tokens_details.cached_tokens if usage and usage.prompt_tokens_details else None,
        choice.routed_experts or "",
    )


def _versions(spans: list[WeightVersionSpan], sampled: int) -> tuple[VersionSpan, ...]:
    versions: list[VersionSpan] = []
    position = 0
    for span in spans:
        if span.start != position or span.end < span.start:
            raise EngineRefused(f"the engine's version spans leave a gap or overlap at token {position}")
        if not span.version.isdecimal():
            raise EngineBroken(f"the engine serves version {span.version!r}, which is none of ours yet")
        if span.end > span.start:
            versions.append(VersionSpan(span.start, span.end - span.start, int(span.version)))
        position = span.end
    if position != sampled:
        raise EngineRefused(f"the engine's version spans cover {position} of {sampled} tokens")
    return tuple(versions)

"""One sample of the engine, for everybody who waits for it.

Promises: it is told once, before anybody sees its end; when the engine breaks off it starts again from the
beginning, unless somebody saw some of it; with nobody waiting it goes on for a grace time and is then called off.
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager

import msgspec

from openforge.bus import BusError, Zombie
from openforge.chat.contract import Guide
from openforge.chat.decoding import IncrementalText, SafeAnswer
from openforge.chat.dialect import Problem, Request
from openforge.protos import EngineIdentity, FinishReason, Sampling, Timing, TurnRecorded, TurnStatus, VersionSpan
from openforge.proxy.context import Context
from openforge.proxy.core import OpenCall, Placement, Sampled, Turn
from openforge.proxy.foreign import Foreign, TooLong
from openforge.proxy.routing import routed_from
from openforge.proxy.upstream import EngineBroken, EngineDeclined, EngineRefused, Piece
from openforge.service import log
from openforge.wire.generate import SamplingParams, StructuredOutputs, WrittenRequest

ENGINE_MODEL = "policy"
_LONGEST_PAUSE_S = 5.0


class Refusal(Exception):
    """A call that has no answer, and what the harness is told instead."""

    def __init__(self, problem: Problem, message: str) -> None:
        super().__init__(message)
        self.problem = problem


class Overflow(Refusal):
    """The prompt leaves no room in the model's window: each dialect has its own words for it."""

    def __init__(self, prompt_tokens: int, window: int) -> None:
        super().__init__(Problem.TOO_LONG, f"the prompt has {prompt_tokens} tokens, which fill the window of {window}")
        self.prompt_tokens = prompt_tokens
        self.window = window


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be sampled. `name` says whose call it is; `prompt` is the placement's as JSON; `calls`: the answer may
    hold tool calls; `pictures` are the bytes of its images by digest, `guide` is what the answer has to match and
    `guided_by` the fields that say so. `request` is the call itself.
    """

    name: str
    placement: Placement
    prompt: bytes
    sampling: Sampling
    calls: bool
    dialect: str
    asked: bytes
    pictures: Mapping[str, bytes] = {}
    guide: Guide | None = None
    guided_by: str = ""
    request: Request


Record = Callable[["Call", TurnStatus], Awaitable[Turn]]


class Call:
    """`reasoning` and `text` are what may be shown already; `outcome` comes when the turn is told, which is `told`."""

    def __init__(self, context: Context, order: Order, record: Record, leave: Callable[["Call"], None]) -> None:
        self.order = order
        self.entry = OpenCall(order.placement.question.digest, order.placement)
        self.id = secrets.token_hex(8)
        self.sampled = Sampled()
        self.reasoning = self.text = ""
        self.shown = False
        self.told: TurnRecorded | None = None
        self.outcome: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        self.outcome.add_done_callback(lambda outcome: outcome.cancelled() or outcome.exception())
        self._context = context
        self._record = record
        self._leave = leave
        self._received_at = time.time()
        self._began = time.monotonic()
        self._first_token_s = self._sampled_s = 0.0
        self._least_version = 0
        self._status: TurnStatus | None = None
        self._problem: Refusal | None = None
        self._wanted = asyncio.Event()
        self._stir = asyncio.Event()
        self._grace: asyncio.TimerHandle | None = None
        self._sampling: asyncio.Task[None] | None = None
        self._feed: _Feed | None = None

    # -- those who wait

    @contextmanager
    def listening(self, *, stream: bool) -> Iterator[None]:
        """Somebody waits for the answer, and with `stream` for its text as it comes."""
        self.entry.listeners += 1
        self._wanted.set()
        if self._grace is not None:
            self._grace.cancel()
        if stream and self._feed is None:
            self._feed = self._new_feed()
            self._show_more()
        try:
            yield
        finally:
            self.entry.listeners -= 1
            self._note_orphan()
            if self.entry.listeners == 0 and not self.outcome.done():
                self._wanted.clear()
                loop = asyncio.get_running_loop()
                self._grace = loop.call_later(self._context.settings.proxy_grace_s, self.stop, TurnStatus.ABANDONED)

    def _note_orphan(self) -> None:
        """An answer that was told while everybody left reached nobody, unless a repeat fetches it."""
        if self.entry.listeners or not self.outcome.done() or self.outcome.cancelled() or self.outcome.exception():
            return
        turn = self.outcome.result()
        turn.received = bool(turn.received)

    async def more(self, thought: int, told: int, leaving: "asyncio.Future[None]", until: float) -> tuple[str, str]:
        """Reasoning after `thought` and text after `told` characters; both empty when the outcome is there, when
        `leaving` is done, and at the time `until`.
        """
        loop = asyncio.get_running_loop()
        alarm = loop.call_at(until, self._stir.set)
        try:
            while len(self.reasoning) <= thought and len(self.text) <= told and loop.time() < until:
                if self.outcome.done() or leaving.done():
                    return "", ""
                self._stir.clear()
                await self._stir.wait()
        finally:
            alarm.cancel()
        return ("", "") if self.outcome.done() or leaving.done() else (self.reasoning[thought:], self.text[told:])

    async def ended(self, leaving: "asyncio.Future[None]") -> None:
        """Returns when the outcome is there or `leaving` is done."""
        while not self.outcome.done() and not leaving.done():
            self._stir.clear()
            await self._stir.wait()

    def stir(self, _: object = None) -> None:
        """Wake those who wait: something that they wait for may be there."""
        self._stir.set()

    def stop(self, status: TurnStatus) -> None:
        """Call the sample off. What was sampled is told with this status."""
        if self._status is not None or self.outcome.done():
            return
        self._status = status
        self.entry.given_up = True
        self._wanted.set()
        self._call_off()

    def _call_off(self) -> None:
        """Again until it ends: a cancellation can be lost on its way down."""
        if self._sampling is not None and not self._sampling.done():
            self._sampling.cancel()
            asyncio.get_running_loop().call_later(1.0, self._call_off)

    # -- its life

    async def live(self) -> None:
        try:
            turn = await self._to_its_end()
        except asyncio.CancelledError:
            self.outcome.cancel()
            raise
        except Refusal as refusal:
            self.outcome.set_exception(refusal)
        except (BusError, Zombie) as error:
            self.outcome.set_exception(Refusal(Problem.ENGINE_FAILED, "the call could not be recorded"))
            if not self._context.fatal.done():
                self._context.fatal.set_exception(error)
        except Exception as error:  # the boundary: a bug costs this call, not those who wait for ever
            log.error("call died", error=error, call=self.order.name)
            self.outcome.set_exception(Refusal(Problem.ENGINE_FAILED, "the proxy failed; the call may be repeated"))
        else:
            self.outcome.set_result(turn)
            self._note_orphan()
        finally:
            if self._grace is not None:
                self._grace.cancel()
            self._leave(self)
            self._stir.set()

    async def _to_its_end(self) -> Turn:
        self._sampling = asyncio.create_task(self._sample())
        try:
            await self._sampling
        except Refusal as refusal:
            self._problem = refusal
        except asyncio.CancelledError:
            if self._status is None:
                raise
        self._sampled_s = self._since()
        while self._status is None and self._problem is None and not self.entry.listeners:
            await self._wanted.wait()
        return await self._told()

    async def _told(self) -> Turn:
        """Record what there is, and say what became of it."""
        if self._problem is None and self._status is None:
            return await self._record(self, TurnStatus.DELIVERED)
        if self.sampled.ids and (self._problem is None or self.shown):
            await self._record(self, self._how_it_ended())
        raise self._problem or self._called_off()

    def _called_off(self) -> Refusal:
        if self._status is TurnStatus.ABANDONED and self.entry.listeners:
            return Refusal(Problem.ENGINE_FAILED, "the proxy is stopping: repeat the call")
        return Refusal(Problem.ENDED, "the attempt has ended")

    def _how_it_ended(self) -> TurnStatus:
        """Whatever was sampled to its end is abandoned, not aborted."""
        self._cover_versions()
        whole = self.sampled.finish is not FinishReason.ABORT
        return TurnStatus.ABORTED if self._status is TurnStatus.ABORTED and not whole else TurnStatus.ABANDONED

    def _cover_versions(self) -> None:
        """A broken-off answer has no spans: the version at its beginning is the oldest that it can have."""
        if not self.sampled.versions:
            self.sampled.versions = (VersionSpan(0, len(self.sampled.ids), self._least_version),)

    # -- sampling

    async def _sample(self) -> None:
        patience = _Patience(self._context.settings.engine_patience_s)
        while True:
            try:
                await self._sample_once()
                return
            except EngineRefused as error:
                raise self._refused(error) from error
            except EngineBroken as error:
                pause_s = patience.pause_s(progress=bool(self.sampled.ids))
                if self.shown or pause_s is None:
                    raise self._failed(str(error)) from error
                log.warning("engine broke off", call=self.order.name, why=str(error), again_in_s=round(pause_s, 2))
            self._begin_again()
            await asyncio.sleep(pause_s)

    async def _sample_once(self) -> None:
        self._least_version = self._context.policy.version
        if self._context.foreign is not None:
            await self._ask(self._context.foreign)
            return
        async with aclosing(self._context.engine.generate(self._request())) as pieces:
            async for piece in pieces:
                self._take(piece)

    async def _ask(self, foreign: Foreign) -> None:
        said = await foreign.answer(self.order.request, self.order.sampling)
        self._first_token_s = self._since()
        self.sampled = Sampled(finish=said.finish, said=said.message, usage=said.usage)

    def _request(self) -> WrittenRequest:
        sampling = self.order.sampling
        return WrittenRequest(
            model=ENGINE_MODEL,
            token_ids=msgspec.Raw(self.order.prompt),
            sampling_params=SamplingParams(
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                seed=sampling.seed,
                stop=list(sampling.stop),
                stop_token_ids=list(self._context.renderer.stop_token_ids),
                structured_outputs=_structured(self.order.guide),
                routed_experts_prompt_start=routed_from(self.order.placement),
            ),
            request_id=f"{self.order.name}-{secrets.token_hex(4)}",
            return_token_ids=True,
            cache_salt=self._context.policy.salt,
            stream=True,
        )

    def _take(self, piece: Piece) -> None:
        if not self.sampled.ids:
            self._first_token_s = self._since()
        self.sampled.ids += piece.ids
        self.sampled.logprobs += piece.logprobs
        if piece.finish is not None:
            self.sampled.finish, self.sampled.stop, self.sampled.versions = piece.finish, piece.stop, piece.versions
            self.sampled.cached_tokens, self.sampled.routed = piece.cached_tokens, piece.routed
        self._show_more()

    def _begin_again(self) -> None:
        self.sampled = Sampled()
        self.reasoning = self.text = ""
        self._feed = self._new_feed() if self._feed is not None else None

    def _refused(self, error: EngineRefused) -> Refusal:
        """What is wrong with a guide is the harness's to mend: everything else in a call to the engine is ours."""
        if self.order.guide is not None and isinstance(error, EngineDeclined):
            return Refusal(Problem.BAD_REQUEST, f"{self.order.guided_by} cannot be followed: {error}")
        if isinstance(error, TooLong):
            window = self._context.config.model.context
            return Overflow(window + 1, window)
        return self._failed(str(error))

    def _failed(self, why: str) -> Refusal:
        log.warning("engine failed", call=self.order.name, why=why)
        return Refusal(Problem.ENGINE_FAILED, f"the model could not answer: {why}")

    # -- text

    def _new_feed(self) -> "_Feed":
        renderer = self._context.renderer
        holds = renderer.holds if self.order.calls else ()
        return _Feed(IncrementalText(renderer.text), SafeAnswer(renderer.thinking, self.order.sampling.stop, holds))

    def _show_more(self) -> None:
        if self._feed is None:
            return
        stops = self._context.renderer.stop_token_ids
        fresh = [token for token in self.sampled.ids[self._feed.fed :] if token not in stops]
        self._feed.fed = len(self.sampled.ids)
        reasoning, text = self._feed.safe.push(self._feed.incremental.push(fresh))
        if reasoning or text:
            self.reasoning += reasoning
            self.text += text
            self._stir.set()

    # -- what the record says

    def timing(self) -> Timing:
        return Timing(
            received_at=self._received_at,
            first_token_s=self._first_token_s,
            sampled_s=self._sampled_s,
            recorded_s=self._since(),
        )

    def engine(self) -> EngineIdentity:
        if self._context.foreign is not None:
            endpoint = self._context.config.engine
            return EngineIdentity(engine=endpoint.url, model=endpoint.model, request=self.id)
        return EngineIdentity(engine=self._context.settings.engine_url, model=ENGINE_MODEL, request=self.id)

    def _since(self) -> float:
        return round(time.monotonic() - self._began, 6)


def _structured(guide: Guide | None) -> StructuredOutputs | None:
    if guide is None:
        return None
    return StructuredOutputs(json=guide.schema or None, grammar=guide.grammar or None)


class _Feed:
    """Ids to text that may be shown; `fed` ids have gone in."""

    def __init__(self, incremental: IncrementalText, safe: SafeAnswer) -> None:
        self.incremental = incremental
        self.safe = safe
        self.fed = 0


class _Patience:
    """Growing pauses until the engine has not answered for too long; progress starts it anew."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._since: float | None = None
        self._pause_s = 0.1

    def pause_s(self, *, progress: bool) -> float | None:
        """None when it is over."""
        now = time.monotonic()
        if self._since is None or progress:
            self._since, self._pause_s = now, 0.1
        self._pause_s = min(self._pause_s * 2, _LONGEST_PAUSE_S)
        return self._pause_s if now + self._pause_s - self._since <= self._patience_s else None

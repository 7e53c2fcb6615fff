"""Where the calls of one attempt are taken, and where they end.

Promises: calls are told one after the other, numbered without gaps; after `close` no call is taken, none is open,
and `turns` are all that were ever told.
"""

import asyncio
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn

import msgspec

from openforge.bus import AlreadyTold, Zombie, tracing
from openforge.chat.canonical import retry_digest
from openforge.chat.contract import Guide
from openforge.chat.decoding import first_stop, reasoning_length
from openforge.chat.dialect import Answer, BadRequest, Problem, Request
from openforge.protos import (
    AttemptKey,
    BranchCause,
    EpisodeEnded,
    EpisodeSealed,
    FinishReason,
    HarnessIdentity,
    Sampling,
    TurnRecorded,
    TurnStatus,
    Usage,
)
from openforge.proxy.calls import Call, Order, Overflow, Refusal
from openforge.proxy.context import Context
from openforge.proxy.core import (
    Attempt,
    Join,
    Placement,
    PromptTooLong,
    Replay,
    Turn,
    room,
    view,
)
from openforge.proxy.records import Asked, forced_of, guided_by, images_of, reply_of, turn_fact
from openforge.proxy.routing import routed_file, routed_from
from openforge.service import log
from openforge.tokens import RecordBroken

_MOST_CONTESTED = 8
_LONG = 8_000
"""Characters that take longer to tokenise than to hand to a thread."""


async def _on_its_way() -> None:
    """What was begun has written to its socket: it runs, then whoever flushes for it."""
    for _ in range(2):
        await asyncio.sleep(0)


def ended(name: str) -> Refusal:
    return Refusal(Problem.ENDED, f"attempt {name} has ended: it takes no more model calls")


class Desk:
    def __init__(self, context: Context, episode: str, attempt: int) -> None:
        self.closed = False
        self.refused = self.malformed = 0
        self._context = context
        self._run = context.config.run.name
        self._episode = episode
        self._attempt = attempt
        self._name = f"{episode}.{attempt}"
        self._tree = Attempt(context.renderer)
        self._calls: dict[int, Call] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._telling = asyncio.Lock()
        self._ordinal = 0
        self._failed: set[str] = set()
        self._unanswered: set[str] = set()
        self._told: set[int] = set()
        self._said_read: set[int] = set()
        self._kept: set[str] = set()

    async def load(self) -> "Desk":
        """Take up what was told before."""
        self.closed = await self._context.bus.is_told(EpisodeEnded, self._run, self._episode, self._attempt)
        await self._load_turns()
        return self

    async def _load_turns(self) -> None:
        told = await self._context.bus.read(TurnRecorded, self._run, self._episode, self._attempt)
        facts = [entry.fact for entry in told]
        self._told = {fact.turn for fact in facts}
        self._said_read.update(*(fact.read for fact in facts))
        tree = Attempt(self._context.renderer)
        tree.open = self._tree.open
        try:
            tree.restore(facts)
            for turn, known in zip(tree.turns, self._tree.turns, strict=False):
                turn.received = turn.received or known.received
                turn.cached_tokens = known.cached_tokens
        except RecordBroken as error:
            log.error("record broken", error=error, episode=self._episode, attempt=self._attempt)
            self.closed = True  # the verifier says what that means; here nothing can be continued
            return
        self._tree = tree
        self._ordinal = max(self._ordinal, len(tree.turns))

    async def catch_up(self) -> None:
        """Take up what another proxy told of this attempt since: turns have no gaps, so the next one tells of all."""
        while await self._context.bus.is_told(TurnRecorded, self._run, self._episode, self._attempt, self._next):
            async with self._telling:
                await self._load_turns()
            if self.closed:
                return

    @property
    def _next(self) -> int:
        """The number of the next turn, as far as this proxy knows."""
        return len(self._tree.turns)

    # -- taking calls

    async def read(self, request: Request) -> None:
        """Tokenise long text that is new here beside everybody else's calls, so that placing this one finds it done."""
        new = self._tree.new(request.messages)
        if sum(len(message.content) for message in new) > _LONG:
            tools = request.tools if len(new) == len(request.messages) else ()
            await asyncio.to_thread(self._context.renderer.prepare, new, tools)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Requests are read here: those that cannot be are counted."""
        try:
            yield
        except BadRequest:
            self.malformed += 1
            raise

    def take(
        self, key: AttemptKey, request: Request, dialect: str, harness: HarnessIdentity, retry: bool
    ) -> Call | Turn:
        """The sample that answers this request: running, told, or begun now. Raises `Refusal`."""
        if self.closed:
            self.refuse()
        asked = self._noted(request).asked_json()
        question = self._tree.question(request.messages, request.tools, "", harness)
        digest = retry_digest(self._name, dialect, harness.thread, question.chain, question.tools_digest, asked)
        match self._tree.admit(digest, retry):
            case Join(entry):
                return self._calls[id(entry)]
            case Replay(turn):
                return turn
        if len(self._tree.turns) + len(self._calls) >= key.turns:
            raise Refusal(Problem.OUT_OF_TURNS, f"this attempt may make {key.turns} model calls and has made them")
        placement = self._tree.place(msgspec.structs.replace(question, digest=digest))
        guide = self._guide(request)
        order = Order(
            name=self._name,
            placement=placement,
            sampling=self._sampling(key, request, placement.prompt_tokens, self._stops(request, guide)),
            prompt=self._tree.written(placement),
            calls=request.calls,
            dialect=dialect,
            asked=asked,
            pictures=request.pictures,
            guide=guide,
            guided_by=guided_by(request) if guide is not None else "",
            request=request,
        )
        return self._begin(order)

    def _guide(self, request: Request) -> Guide | None:
        return self._context.renderer.guide(
            request.tools, request.tool_choice, parallel=request.parallel_calls, schema=request.schema
        )

    def _stops(self, request: Request, guide: Guide | None) -> tuple[str, ...]:
        """Where the answer ends. One that may make a single call, and is not guided, ends with its first one."""
        stops = (*self._context.config.sampling.stop, *request.stop)
        call_ends = self._context.renderer.call_ends
        if guide is None and request.calls and not request.parallel_calls and call_ends:
            stops = (*stops, call_ends)
        return tuple(dict.fromkeys(stops))

    def _noted(self, request: Request) -> Request:
        """With a note of what this model does not get to see."""
        images = sum(len(message.images) for message in request.messages)
        if not images or self._context.renderer.sees_images:
            return request
        note = (
            f"{images} images are recorded and not shown: renderer {self._context.config.model.renderer} has only text"
        )
        return msgspec.structs.replace(request, notes=(*request.notes, note))

    def count(self, request: Request, harness: HarnessIdentity) -> int:
        """How many tokens the prompt of such a call would have now. Raises `Refusal`."""
        if self.closed:
            self.refuse()
        return self._tree.place(self._tree.question(request.messages, request.tools, "", harness)).prompt_tokens

    def answer(self, turn: Turn, request: Request) -> Answer:
        """What turn `turn` says to `request`."""
        renderer = self._context.renderer
        reasoning_tokens, stop = 0, ""
        if turn.reply.reasoning or request.stop:
            sampled = view(self._tree.ids(turn))[turn.prompt_tokens :]
            if renderer.thinking and turn.reply.reasoning:
                reasoning_tokens = reasoning_length(renderer.text, sampled, renderer.thinking[1])
            if turn.finish is FinishReason.STOP and len(sampled) and sampled[-1] not in renderer.stop_token_ids:
                stop = first_stop(renderer.text(sampled), request.stop)
        counted = turn.usage or Usage(
            prompt_tokens=turn.prompt_tokens,
            completion_tokens=turn.sampled_tokens,
            cached_tokens=turn.cached_tokens,
        )
        return Answer(
            message=turn.reply,
            finish=turn.finish,
            prompt_tokens=counted.prompt_tokens,
            completion_tokens=counted.completion_tokens,
            cached_tokens=counted.cached_tokens,
            reasoning_tokens=reasoning_tokens,
            stop=stop,
        )

    def refuse(self) -> NoReturn:
        """The attempt is over. Raises `Refusal`."""
        self.refused += 1
        raise ended(self._name)

    def _sampling(self, key: AttemptKey, request: Request, prompt_tokens: int, stops: tuple[str, ...]) -> Sampling:
        pinned = self._context.config.sampling
        window = self._context.config.model.context
        try:
            tokens = room(prompt_tokens, window, (pinned.max_tokens, key.tokens_per_turn, request.max_tokens))
        except PromptTooLong as error:
            raise Overflow(error.prompt_tokens, error.window) from error
        return Sampling(
            temperature=pinned.temperature,
            top_p=pinned.top_p,
            top_k=pinned.top_k,
            max_tokens=tokens,
            stop=stops,
            seed=self._seed(),
        )

    def _seed(self) -> int:
        """Another one for each call of the run, and the same one when the run is repeated, or the attempt: whether one
        was lost decides nothing about what is drawn."""
        words = f"{self._context.config.run.seed}/{self._episode}/{self._ordinal}"
        return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=4).digest(), "little") >> 1

    def _begin(self, order: Order) -> Call:
        self._ordinal += 1
        call = Call(self._context, order, self._tell, self._leave)
        self._calls[id(call.entry)] = call
        self._tree.open.append(call.entry)
        task = asyncio.create_task(self._traced(call), name=f"call {self._name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return call

    async def _traced(self, call: Call) -> None:
        attempt = tracing.of_attempt(self._run, self._episode, self._attempt)
        with tracing.span("model call", attempt, run=self._run, attempt=self._name, dialect=call.order.dialect):
            await call.live()
            if call.told is not None:
                await asyncio.sleep(0)  # those who wait for the answer come first
                self._say(call.told, call.order.placement.prompt_tokens)

    def _leave(self, call: Call) -> None:
        del self._calls[id(call.entry)]
        self._tree.open.remove(call.entry)
        digest = call.entry.digest
        if call.outcome.cancelled():
            return
        outcome = call.outcome.exception()
        if outcome is None:
            self._failed.discard(digest)
            self._unanswered.discard(digest)
        elif isinstance(outcome, Refusal) and outcome.problem is Problem.ENGINE_FAILED:
            self._failed.add(digest)
        elif isinstance(outcome, Refusal) and outcome.problem is Problem.ENDED and not call.sampled.begun:
            self._unanswered.add(digest)
            self._failed.discard(digest)
        elif isinstance(outcome, Refusal) and outcome.problem is Problem.BAD_REQUEST:
            self.malformed += 1

    # -- telling turns

    async def _tell(self, call: Call, status: TurnStatus) -> Turn:
        async with self._telling:
            for _ in range(_MOST_CONTESTED):
                try:
                    return await self._tell_next(call, status)
                except AlreadyTold as error:
                    log.warning("another proxy told this turn", subject=error.subject)
                    await self._load_turns()
            raise Zombie(f"another proxy works for run {self._run}: it tells the turns of {self._name}")

    async def _tell_next(self, call: Call, status: TurnStatus) -> Turn:
        order = call.order
        placement = self._tree.settled(order.placement)
        question = placement.question
        reply = reply_of(self._context.renderer, call.sampled, question.tools if order.calls else (), f"call_{call.id}")
        fact = turn_fact(
            self._run,
            self._episode,
            self._attempt,
            self._next,
            placement,
            call.sampled,
            reply,
            Asked(order.sampling, order.asked, order.dialect, call.engine()),
            status,
            call.timing(),
        )
        if order.guide is not None:
            fact = msgspec.structs.replace(fact, guided=True, forced=forced_of(call.sampled.logprobs))
        if read := self._newly_read(placement):
            fact = msgspec.structs.replace(fact, read=read)
        if images := images_of(question.messages[placement.kept :]):
            await self._keep(order.pictures)
            fact = msgspec.structs.replace(fact, images=images)
        if (routed := await routed_file(placement, call.sampled)) is not None:
            kept = await self._context.bus.blobs.put(routed)
            fact = msgspec.structs.replace(fact, routed_experts=kept, routed_from=routed_from(placement))
        telling = asyncio.create_task(self._context.bus.tell(fact))
        try:
            await _on_its_way()
            made = self._tree.made(fact, placement, reply, order.prompt)  # while the stream stores it
            await telling
        except AlreadyTold as error:
            if not error.same:
                raise
        finally:
            telling.cancel()  # where it still runs, nobody waits for it
        call.told = fact
        self._told.add(fact.turn)
        self._said_read.update(fact.read)
        turn = self._tree.add(made)
        turn.cached_tokens = call.sampled.cached_tokens
        return turn

    def _say(self, fact: TurnRecorded, prompt_tokens: int) -> None:
        log.info(
            "turn recorded",
            episode=self._episode,
            attempt=self._attempt,
            turn=fact.turn,
            cause=fact.cause,
            status=fact.status,
            finish=fact.finish,
            prompt_tokens=prompt_tokens,
            sampled_tokens=fact.sampled_tokens(),
            s=fact.timing.recorded_s,
        )
        tracing.note(turn=fact.turn, sampled_tokens=fact.sampled_tokens(), first_token_s=fact.timing.first_token_s)

    def _newly_read(self, placement: Placement) -> tuple[int, ...]:
        """Answers that were read and are not said to be; the one that this turn goes on from goes without saying."""
        known = {placement.parent} if placement.cause is BranchCause.CONTINUED else set()
        return tuple(turn for turn in self._tree.read() if turn not in self._said_read | known)

    async def _keep(self, pictures: Mapping[str, bytes]) -> None:
        """What a record refers to is there before the record is."""
        for digest, picture in pictures.items():
            if digest not in self._kept:
                await self._context.bus.blobs.put(picture)
                self._kept.add(digest)

    # -- the end

    async def close(self) -> EpisodeSealed:
        """Take no more calls, call off the open ones, and say what there is."""
        await self.end()
        await self.catch_up()
        return EpisodeSealed(
            run=self._run,
            episode=self._episode,
            attempt=self._attempt,
            turns=tuple(sorted(self._told)),
            refused=self.refused,
            engine_failures=len(self._failed),
            malformed=self.malformed,
            orphaned=tuple(turn.number for turn in self._tree.turns if self._is_orphan(turn)),
            unanswered=len(self._unanswered),
        )

    def _is_orphan(self, turn: Turn) -> bool:
        """Whether nobody read its answer to the end. What another proxy knows of its own turns is not known here."""
        if turn.continued_by is not None or turn.status is not TurnStatus.DELIVERED:
            return False
        return not turn.received if self._context.settings.proxy_replicas == 1 else turn.received is False

    async def end(self) -> None:
        """Take no more calls, and call off the open ones."""
        self.closed = True
        self.stop(TurnStatus.ABORTED)
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    def stop(self, status: TurnStatus) -> None:
        for call in list(self._calls.values()):
            call.stop(status)

    async def drained(self, timeout_s: float) -> None:
        """Wait for the open calls; those that are still open then are given up."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)
        self.stop(TurnStatus.ABANDONED)
        while self._tasks:
            await asyncio.wait(set(self._tasks))

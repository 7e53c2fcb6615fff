"""Where the calls of one attempt are taken, and where they end.

Promises: calls are told one after the other, numbered without gaps; after `close` no call is taken, none is open,
and `turns` are all that were ever told.
"""

import asyncio
import dataclasses
import hashlib
from collections.abc import Callable
from typing import NoReturn

from openforge.bus import AlreadyTold, Zombie
from openforge.chat.canonical import retry_digest
from openforge.chat.decoding import first_stop, reasoning_length
from openforge.chat.dialect import Answer, Problem, Request
from openforge.protos import (
    AttemptKey,
    EpisodeEnded,
    EpisodeSealed,
    FinishReason,
    HarnessIdentity,
    Sampling,
    TurnRecorded,
    TurnStatus,
)
from openforge.proxy.calls import Call, Order, Overflow, Refusal
from openforge.proxy.context import Context
from openforge.proxy.core import Asked, Attempt, Join, PromptTooLong, Replay, Turn, reply_of, room, turn_fact, view
from openforge.service import log
from openforge.tokens import RecordBroken

_MOST_CONTESTED = 3


def ended(name: str) -> Refusal:
    return Refusal(Problem.ENDED, f"attempt {name} has ended: it takes no more model calls")


class Desk:
    def __init__(self, context: Context, episode: str, attempt: int) -> None:
        self.closed = False
        self.refused = 0
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
        self._told: set[int] = set()

    async def load(self) -> "Desk":
        """Take up what was told before."""
        self.closed = await self._context.bus.find(EpisodeEnded, self._run, self._episode, self._attempt) is not None
        await self._load_turns()
        return self

    async def _load_turns(self) -> None:
        told = await self._context.bus.read(TurnRecorded, self._run, self._episode, self._attempt)
        facts = [entry.fact for entry in told]
        self._told = {fact.turn for fact in facts}
        tree = Attempt(self._context.renderer)
        tree.open = self._tree.open
        try:
            tree.restore(facts)
        except RecordBroken as error:
            log.error("record broken", error=error, episode=self._episode, attempt=self._attempt)
            self.closed = True  # the verifier says what that means; here nothing can be continued
            return
        self._tree = tree
        self._ordinal = max(self._ordinal, len(tree.turns))

    # -- taking calls

    def take(
        self, key: AttemptKey, request: Request, dialect: str, harness: HarnessIdentity, retry: bool
    ) -> Call | Turn:
        """The sample that answers this request: running, told, or begun now. Raises `Refusal`."""
        if self.closed:
            self.refuse()
        asked = request.asked_json()
        question = self._tree.question(request.messages, request.tools, "", harness)
        digest = retry_digest(self._name, dialect, harness.thread, question.chain, request.tools, asked)
        match self._tree.admit(digest, retry):
            case Join(entry):
                return self._calls[id(entry)]
            case Replay(turn):
                return turn
        if len(self._tree.turns) + len(self._calls) >= key.turns:
            raise Refusal(Problem.OUT_OF_TURNS, f"this attempt may make {key.turns} model calls and has made them")
        placement = self._tree.place(dataclasses.replace(question, digest=digest))
        order = Order(
            name=self._name,
            placement=placement,
            sampling=self._sampling(key, request, placement.prompt_tokens),
            calls=request.calls,
            dialect=dialect,
            asked=asked,
        )
        return self._begin(order)

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
        return Answer(
            message=turn.reply,
            finish=turn.finish,
            prompt_tokens=turn.prompt_tokens,
            completion_tokens=turn.sampled_tokens,
            reasoning_tokens=reasoning_tokens,
            stop=stop,
        )

    def refuse(self) -> NoReturn:
        """The attempt is over. Raises `Refusal`."""
        self.refused += 1
        raise ended(self._name)

    def _sampling(self, key: AttemptKey, request: Request, prompt_tokens: int) -> Sampling:
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
            stop=tuple(dict.fromkeys((*pinned.stop, *request.stop))),
            seed=self._seed(),
        )

    def _seed(self) -> int:
        """Another one for each call of the run, and the same one when the run is repeated."""
        words = f"{self._context.config.run.seed}/{self._name}/{self._ordinal}"
        return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=4).digest(), "little") >> 1

    def _begin(self, order: Order) -> Call:
        self._ordinal += 1
        call = Call(self._context, order, self._tell, self._leave)
        self._calls[id(call.entry)] = call
        self._tree.open.append(call.entry)
        task = asyncio.create_task(call.live(), name=f"call {self._name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return call

    def _leave(self, call: Call) -> None:
        del self._calls[id(call.entry)]
        self._tree.open.remove(call.entry)
        digest = call.entry.digest
        if call.outcome.cancelled():
            return
        outcome = call.outcome.exception()
        if outcome is None:
            self._failed.discard(digest)
        elif isinstance(outcome, Refusal) and outcome.problem is Problem.ENGINE_FAILED:
            self._failed.add(digest)

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
        question = order.placement.question
        reply = reply_of(self._context.renderer, call.sampled, question.tools if order.calls else (), f"call_{call.id}")
        fact = turn_fact(
            self._run,
            self._episode,
            self._attempt,
            len(self._tree.turns),
            order.placement,
            call.sampled,
            reply,
            Asked(order.sampling, order.asked, order.dialect, call.engine()),
            status,
            call.timing(),
        )
        try:
            await self._context.bus.tell(fact)
        except AlreadyTold as error:
            if not error.same:
                raise
        log.info(
            "turn recorded",
            episode=self._episode,
            attempt=self._attempt,
            turn=fact.turn,
            cause=fact.cause,
            status=status,
            finish=fact.finish,
            prompt_tokens=order.placement.prompt_tokens,
            sampled_tokens=len(call.sampled.ids),
            s=fact.timing.recorded_s,
        )
        self._told.add(fact.turn)
        return self._tree.add(fact, order.placement, reply)

    # -- the end

    async def close(self) -> EpisodeSealed:
        """Take no more calls, call off the open ones, and say what there is."""
        self.closed = True
        self.stop(TurnStatus.ABORTED)
        while self._tasks:
            await asyncio.wait(set(self._tasks))
        return EpisodeSealed(
            run=self._run,
            episode=self._episode,
            attempt=self._attempt,
            turns=tuple(sorted(self._told)),
            refused=self.refused,
            engine_failures=len(self._failed),
        )

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


class Desks:
    """The desks of all attempts at work, loaded when they are first needed."""

    def __init__(self, open_desk: Callable[[str, int], Desk]) -> None:
        self._open_desk = open_desk
        self._desks: dict[tuple[str, int], asyncio.Task[Desk]] = {}
        self._sealed: set[tuple[str, int]] = set()

    def refuse(self, episode: str, attempt: int) -> NoReturn:
        """The attempt's key opens nothing any more. Raises `Refusal`."""
        task = self._desks.get((episode, attempt))
        if task is not None and task.done() and not task.exception():
            task.result().refuse()
        raise ended(f"{episode}.{attempt}")

    async def open(self, episode: str, attempt: int) -> Desk:
        """The desk, for a caller; raises `Refusal` where everything is over."""
        if (episode, attempt) in self._sealed:
            raise ended(f"{episode}.{attempt}")
        return await self.of(episode, attempt)

    async def of(self, episode: str, attempt: int) -> Desk:
        key = (episode, attempt)
        if key not in self._desks:
            self._desks[key] = asyncio.create_task(self._open_desk(episode, attempt).load())
        task = self._desks[key]
        try:
            return await asyncio.shield(task)
        except BaseException:
            if task.done() and (task.cancelled() or task.exception()) and self._desks.get(key) is task:
                del self._desks[key]
            raise

    def sealed(self, episode: str, attempt: int) -> None:
        self._desks.pop((episode, attempt), None)
        self._sealed.add((episode, attempt))

    async def drain(self, timeout_s: float) -> None:
        desks = [task.result() for task in self._desks.values() if task.done() and not task.exception()]
        await asyncio.gather(*(desk.drained(timeout_s) for desk in desks))

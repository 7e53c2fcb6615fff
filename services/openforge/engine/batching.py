"""Continuous batching: requests join and leave between steps, prompts are computed once for all that share them.

Promises: every request makes progress or ends; after a change of weights nothing that the old ones computed is
read again, and each token carries the version that sampled it; where the limits say `batch_invariant`, an answer is
the same, log-probs to the bit, whatever runs beside it and whatever ran before. No thread, clock or socket: `step` is
the time.
"""

from collections import deque
from collections.abc import Callable, Sequence
from statistics import mode

import msgspec
import numpy as np
import torch

from openforge.engine.attention import Decode, Fill, OwnRows, SharedPrefix, Step
from openforge.engine.llama import Llama
from openforge.engine.prefix_tree import PrefixTree, common_prefix
from openforge.engine.request import Request
from openforge.engine.routed import Chosen, Routed, rows_of
from openforge.engine.rows import Rows
from openforge.engine.sampler import sample, sample_apart
from openforge.engine.stopping import Ended

_WORTH_SHARING = 16  # tokens; a shorter common prefix is copied to each request
_INVARIANT_TOKENS = 64  # a prompt is computed and remembered in blocks of so many, whoever needs it first


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """`fill_tokens` is how many prompt tokens one step computes at most, `cache_tokens` what the tree may hold.

    `batch_invariant` needs a model that is, too. It shares only whole blocks of prompts, which everybody computes
    alike, and no answers, and reads every request's own row to its end. With `routed_experts` it is recorded which
    experts each token went through.
    """

    requests: int = 64
    fill_tokens: int = 256
    cache_tokens: int = 16384
    batch_invariant: bool = False
    routed_experts: bool = False


class Served(msgspec.Struct, frozen=True):
    """The weights in use and the name of their version."""

    model: Llama
    version: str


class _Prompt:
    """A prompt being computed for the request that came first; others that share it wait. `routed` grows with it."""

    def __init__(
        self, request: Request, tokens: list[int], kv: torch.Tensor, done: int, routed: list[Chosen] | None
    ) -> None:
        self.request = request
        self.tokens = tokens
        self.kv = kv
        self.done = done
        self.routed = routed

    def all_routed(self) -> Chosen | None:
        return None if self.routed is None else np.concatenate(self.routed)


class Counters(msgspec.Struct):
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    steps: int = 0


class Batch:
    """All requests of one engine and the weights they run on."""

    def __init__(self, served: Served, limits: Limits) -> None:
        self.served = served
        self.counters = Counters()
        self.limits = limits
        self._waiting: deque[Request] = deque()
        self._prompts: list[_Prompt] = []
        self._running: list[Request] = []
        self._use(served)

    @property
    def running(self) -> int:
        return len(self._running) + len(self._prompts)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def kv_use(self) -> float:
        """What running requests hold, over what the prefixes may: above 1, histories that agents come back to are
        forgotten. What several share counts once. For other threads: lists are copied, a number may be a step old."""
        requests = [*self._running, *(prompt.request for prompt in list(self._prompts))]
        shared = {request.shared_key for request in requests if request.shared is not None}
        own = (
            len(request.prompt) + len(request.sampled) - (request.shared_key[1] if request.shared is not None else 0)
            for request in requests
        )
        return (sum(own) + sum(length for _, length in shared)) / max(self.limits.cache_tokens, 1)

    def add(self, request: Request) -> None:
        self._waiting.append(request)

    def swap(self, served: Served) -> None:
        """Go on with other weights: whatever runs is computed anew from its tokens, and keeps its turn."""
        again = [*self._running, *(prompt.request for prompt in self._prompts)]
        self.counters.preemptions += len(self._running)
        for request in again:
            request.row = request.shared = None
            if request.sampled:
                request.routed.begin_anew()
            else:
                request.routed = Routed()
        self._waiting.extendleft(reversed(again))
        self._running, self._prompts = [], []
        self._use(served)

    def rename(self, version: str) -> None:
        """The same weights under another version's name."""
        self.served = Served(self.served.model, version)

    def forget_prefixes(self) -> None:
        grain = _INVARIANT_TOKENS if self.limits.batch_invariant else 1
        self._tree = PrefixTree(self.limits.cache_tokens, grain)

    def abort(self, wanted: Callable[[Request], bool]) -> list[Request]:
        """End what is wanted with the tokens it has; those requests."""
        everyone = [*self._waiting, *(prompt.request for prompt in self._prompts), *self._running]
        gone = [request for request in everyone if wanted(request)]
        for request in gone:
            request.ended = Ended("abort")
            self._release(request)
        self._waiting = deque(request for request in self._waiting if request.ended is None)
        self._prompts = [prompt for prompt in self._prompts if prompt.request.ended is None]
        self._running = [request for request in self._running if request.ended is None]
        return gone

    def step(self, *, admit: bool = True) -> list[Request]:
        """One forward pass; the requests that have one token more."""
        if admit:
            self._admit()
        fills = self._next_fills()
        if not self._running and not fills:
            return []
        self.counters.steps += 1
        decoding = self._order_running()
        hidden = self._forward(decoding, fills)
        self._finish_fills(fills)
        if decoding:
            self._sample(decoding, hidden[: len(decoding)])
        return decoding

    def score(self, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
        """Log-probs of a given answer, float32, temperature 1, computed apart from all requests."""
        return score(self.served.model, prompt, answer)

    def _use(self, served: Served) -> None:
        shape, dtype = served.model.shape, served.model.dtype
        self.served = served
        self.forget_prefixes()
        self._routes = self.limits.routed_experts and shape.experts > 0
        self._rows = Rows(shape.layers, shape.kv_heads, shape.head_size, dtype)

    # Joining

    def _admit(self) -> None:
        """Start what waits, in order, while there is room. A prompt that another is computing is waited for."""
        kept: list[Request] = []
        while self._waiting and self.running < self.limits.requests:
            request = self._waiting.popleft()
            if not self._start(request):
                kept.append(request)
        self._waiting.extendleft(reversed(kept))

    def _start(self, request: Request) -> bool:
        tokens = request.tokens
        need = len(tokens) - 1
        pieces = self._tree.match(tokens, need)
        held = sum(piece.length for piece in pieces)
        if any(self._tree.whole(common_prefix(prompt.tokens, tokens)) > held for prompt in self._prompts):
            return False
        if not request.sampled:
            request.cached_tokens = held
            self.counters.prompt_tokens += len(tokens)
            self.counters.prefix_queries += need
            self.counters.prefix_hits += held
        if held == need:
            self._join(request)
            return True
        kv = _empty_kv(self.served.model, need)
        at = 0
        for piece in pieces:
            kv[:, :, :, at : at + piece.length] = piece.kv
            at += piece.length
        routed = [piece.routed for piece in pieces if piece.routed is not None] if self._routes else None
        self._prompts.append(_Prompt(request, tokens[:need], kv, held, routed))
        return True

    def _join(self, request: Request, computed: _Prompt | None = None) -> None:
        """The request decodes from the next step on. `computed` stands in for what the tree had no room for."""
        need = len(request.prompt) + len(request.sampled) - 1
        pieces = self._tree.match(request.tokens, need)
        parts = [piece.kv for piece in pieces]
        if sum(piece.length for piece in pieces) < need:
            assert computed is not None
            parts = [computed.kv]
        elif pieces and (shared := self._worth_sharing(request, pieces[0].length)):
            request.shared = parts[0][:, :, :, :shared]
            request.shared_key = (request.shared.data_ptr(), shared)
            parts[0] = parts[0][:, :, :, shared:]
        request.row = self._rows.claim(parts)
        for rows in (computed.routed or []) if computed is not None else [piece.routed for piece in pieces]:
            if rows is not None:
                request.routed.add(rows)
        self._running.append(request)

    def _worth_sharing(self, request: Request, longest: int) -> int:
        """How many of the first tokens to read together with others: what most waiting prompts have in common with
        this one, so that all who come in one wave share the same prefix."""
        if self.limits.batch_invariant:
            return 0
        tokens = request.tokens
        others = (common_prefix(tokens, other.prompt) for other in self._waiting)
        shorter = [common for common in others if _WORTH_SHARING <= common < longest]
        if shorter:
            return mode(shorter)
        return longest if longest >= _WORTH_SHARING else 0

    # Computing

    def _next_fills(self) -> list[tuple[_Prompt, Fill]]:
        budget = self.limits.fill_tokens
        fills: list[tuple[_Prompt, Fill]] = []
        for prompt in self._prompts:
            start = prompt.done
            while start < len(prompt.tokens) and budget > 0:
                end = min(self._fill_end(start, budget), len(prompt.tokens))
                if end - start > budget and fills:
                    return fills
                fills.append((prompt, Fill(prompt.kv, start, end)))
                budget -= end - start
                start = end
        return fills

    def _fill_end(self, start: int, budget: int) -> int:
        """Where a run of prompt tokens ends: by the budget, or by the position alone."""
        if self.limits.batch_invariant:
            return (start // _INVARIANT_TOKENS + 1) * _INVARIANT_TOKENS
        return start + budget

    def _order_running(self) -> list[Request]:
        """Running requests in the order in which their rows lie."""
        for request in self._running:
            assert request.row is not None
            request.row = self._rows.make_room(request.row)
        by_row = {request.row: request for request in self._running}
        return [by_row[row] for rows in self._rows.classes for row in rows.rows]

    def _forward(self, decoding: list[Request], fills: list[tuple[_Prompt, Fill]]) -> torch.Tensor:
        tokens = [request.last_token for request in decoding]
        positions = [len(request.prompt) + len(request.sampled) - 1 for request in decoding]
        for prompt, fill in fills:
            tokens += prompt.tokens[fill.start : fill.end]
            positions += range(fill.start, fill.end)
        attend = Step(len(decoding), self._decode(decoding) if decoding else None, [fill for _, fill in fills])
        chosen: list[torch.Tensor] | None = [] if self._routes else None
        hidden = self.served.model.forward(torch.tensor(tokens), torch.tensor(positions), attend, chosen)
        for request in decoding:
            assert request.row is not None
            request.row.length += 1
        if chosen is not None:
            self._record(decoding, fills, rows_of(chosen, self.served.model.shape.experts))
        return hidden

    def _record(self, decoding: list[Request], fills: list[tuple[_Prompt, Fill]], rows: Chosen) -> None:
        for index, request in enumerate(decoding):
            request.routed.add(rows[index : index + 1].copy())  # a view would keep all of them
        at = len(decoding)
        for prompt, fill in fills:
            assert prompt.routed is not None
            prompt.routed.append(rows[at : at + fill.end - fill.start].copy())
            at += fill.end - fill.start

    def _decode(self, decoding: list[Request]) -> Decode:
        own, first = [], 0
        for rows in self._rows.classes:
            own.append(OwnRows(rows, first, whole=self.limits.batch_invariant))
            first += len(rows.rows)
        members: dict[tuple[int, int], list[int]] = {}
        for index, request in enumerate(decoding):
            if request.shared is not None:
                members.setdefault(request.shared_key, []).append(index)
        shared = []
        for indices in members.values():
            kv = decoding[indices[0]].shared
            assert kv is not None
            shared.append(SharedPrefix(kv, indices, len(decoding)))
        return Decode(own, shared)

    def _finish_fills(self, fills: list[tuple[_Prompt, Fill]]) -> None:
        for prompt, fill in fills:
            prompt.done = fill.end
            if prompt.done == len(prompt.tokens):
                self._prompts.remove(prompt)
                self._tree.insert(prompt.tokens, prompt.kv, routed=prompt.all_routed())
                self._join(prompt.request, prompt)

    def _sample(self, decoding: list[Request], hidden: torch.Tensor) -> None:
        logits = self.served.model.logits(hidden)
        draw_all = sample_apart if self.limits.batch_invariant else sample
        ids, logprobs = draw_all(logits, [request.draw() for request in decoding])
        self.counters.generation_tokens += len(ids)
        for request, token, logprob in zip(decoding, ids, logprobs, strict=True):
            request.take(token, logprob, self.served.version)
            if request.ended is not None:
                self._remember(request)
                self._release(request)
        self._running = [request for request in self._running if request.ended is None]

    # Leaving

    def _remember(self, request: Request) -> None:
        """The next call of the same conversation begins with this one's tokens."""
        if self.limits.batch_invariant:
            return  # computed one by one, they have other bits than the same tokens in a prompt
        assert request.row is not None
        start = 0 if request.shared is None else request.shared.shape[3]
        routed = request.routed.now() if self._routes else None
        self._tree.insert(request.tokens[:-1], self._rows.kv(request.row), kv_start=start, routed=routed)

    def _release(self, request: Request) -> None:
        if request.row is not None:
            self._rows.release(request.row)
        request.row = request.shared = None


def score(model: Llama, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
    """Log-probs of `answer` after `prompt`, float32, temperature 1."""
    tokens = [*prompt, *answer]
    need = len(tokens) - 1
    fill = Fill(_empty_kv(model, need), 0, need)
    hidden = model.forward(torch.tensor(tokens[:need]), torch.arange(need), Step(0, None, [fill]))
    logits = model.logits(hidden[len(prompt) - 1 :])
    chosen = torch.tensor(list(answer))
    picked = logits.log_softmax(-1).gather(1, chosen[:, None])[:, 0]
    return [float(value) for value in picked]


def _empty_kv(model: Llama, tokens: int) -> torch.Tensor:
    shape = model.shape
    return torch.zeros(shape.layers, 2, shape.kv_heads, tokens, shape.head_size, dtype=model.dtype)

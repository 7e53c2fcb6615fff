"""The embedded engine: the newest weights, the thread that computes with them, the tokenizer for stop strings.

Promises: weights are swapped between two steps or not at all; until the first ones are there, nothing is served.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from openforge.engine.batching import Limits, Served
from openforge.engine.checkpoint import read_shape
from openforge.engine.guide import BadGuide, Guide, Guides
from openforge.engine.loading import Loaded, load
from openforge.engine.request import Request
from openforge.engine.stopping import StopRule
from openforge.engine.worker import Call, Worker
from openforge.weights import BadWeights
from openforge.wire.generate import SamplingParams

UNNAMED = "default"  # vLLM's label for weights that nobody gave a version


class NotServing(RuntimeError):
    """No weights yet."""


class Refused(ValueError):
    """The request cannot be answered as it is; the message says why and what would do."""


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`context` 0 is the model's own. `cache_mb` is what the prefix cache may hold. With `routed_experts` answers of a
    mixture of experts say which experts each token went through."""

    model_name: str = "policy"
    dtype: str = "bfloat16"
    threads: int = 1
    max_requests: int = 64
    context: int = 0
    cache_mb: int = 1024
    fill_tokens: int = 256
    batch_invariant: bool = False
    routed_experts: bool = False


class EmbeddedEngine:
    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self.loaded: Loaded | None = None
        self.worker: Worker | None = None
        self._tokenizer: Tokenizer | None = None
        self._guides: Guides | None = None
        self._loading = asyncio.Lock()

    @property
    def context(self) -> int:
        """The longest sequence in tokens: vLLM's max_model_len."""
        own = self.serving.model.shape.context
        return min(self.options.context or own, own)

    @property
    def serving(self) -> Loaded:
        if self.loaded is None:
            raise NotServing("no weights are served yet: the first version has not been published or is being loaded")
        return self.loaded

    @property
    def version(self) -> str:
        return self.running.batch.served.version

    @property
    def running(self) -> Worker:
        if self.worker is None:
            raise NotServing("no weights are served yet: the first version has not been published or is being loaded")
        return self.worker

    async def load(self, folder: Path, digest: str = "") -> Loaded:
        """Serve the weights of `folder` from the next step on; raises `BadWeights` and goes on with the old ones."""
        async with self._loading:
            invariant = self.options.batch_invariant
            loaded = await asyncio.to_thread(load, folder, self.options.dtype, digest=digest, batch_invariant=invariant)
            await self._swap(loaded)
            return loaded

    async def stop(self) -> None:
        if self.worker is not None:
            await self.worker.stop()

    def submit(self, request_id: str, token_ids: list[int], params: SamplingParams) -> Call:
        """Raises `Refused` or `NotServing`."""
        worker, loaded = self.running, self.serving
        if params.stop and self._tokenizer is None:
            raise Refused("stop needs a tokenizer, and the model's folder has none: use stop_token_ids")
        longest = self._longest(token_ids, params)
        rule = StopRule(
            end_token_ids=frozenset() if params.ignore_eos else frozenset(loaded.model.shape.stop_token_ids),
            stop_token_ids=frozenset(params.stop_token_ids),
            stop=tuple(params.stop),
            longest=longest,
            decode=self._decode if params.stop else _no_text,
        )
        return worker.submit(Request(request_id, token_ids, params, rule, self._guide(params)))

    def _guide(self, params: SamplingParams) -> Guide | None:
        wanted = params.structured_outputs
        if wanted is None or params.forced_token_ids is not None:
            return None
        if self._guides is None:
            raise Refused("structured_outputs needs a tokenizer, and the model's folder has none: leave it out")
        ends = [*params.stop_token_ids, *self.serving.model.shape.stop_token_ids]
        if not ends:
            raise Refused("structured_outputs needs an end token, and the model has none: send stop_token_ids")
        try:
            return self._guides.make(wanted, ends[0])
        except BadGuide as error:
            raise Refused(f"structured_outputs cannot be followed: {error}") from error

    def _longest(self, token_ids: list[int], params: SamplingParams) -> int:
        refuse_what_cannot_be(token_ids, params, self.serving.model.shape.vocabulary)
        room = self.context - len(token_ids)
        if room < 1:
            raise Refused(
                f"the prompt has {len(token_ids)} tokens, but max_model_len is {self.context} tokens, prompt and "
                f"answer together: shorten the prompt to {self.context - 1} tokens or fewer"
            )
        forced = params.forced_token_ids
        return min(room, params.max_tokens, len(forced) if forced is not None else room)

    async def _swap(self, loaded: Loaded) -> None:
        served = Served(loaded.model, loaded.version or UNNAMED)
        if self.worker is None:
            path = loaded.model_folder / "tokenizer.json"
            self._tokenizer = Tokenizer.from_file(str(path)) if path.exists() else None
            self._guides = Guides(path, loaded.model.shape.vocabulary) if path.exists() else None
            self.worker = Worker(served, self._limits(loaded), threads=self.options.threads)
        elif loaded.model.shape != self.serving.model.shape:
            raise BadWeights(f"weights {loaded.folder}: another shape of model than the one that is served.")
        else:
            await self.worker.ask(lambda batch: batch.swap(served))
        self.loaded = loaded

    def _limits(self, loaded: Loaded) -> Limits:
        options = self.options
        return Limits(
            requests=options.max_requests,
            fill_tokens=options.fill_tokens,
            cache_tokens=(options.cache_mb << 20) // loaded.model.kv_bytes_per_token,
            batch_invariant=options.batch_invariant,
            routed_experts=options.routed_experts,
        )

    def _decode(self, ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            return ""
        return str(self._tokenizer.decode(list(ids)))


def refuse_what_cannot_be(token_ids: list[int], params: SamplingParams, vocabulary: int) -> None:
    """Raises `Refused` naming field, value and way out."""
    forced = params.forced_token_ids
    if not token_ids:
        raise Refused("token_ids is empty: send at least one token")
    if (wrong := _outside(token_ids, vocabulary)) is not None:
        raise Refused(f"token_ids holds {wrong}: the vocabulary has ids 0 to {vocabulary - 1}")
    if params.max_tokens < 1:
        raise Refused(f"max_tokens = {params.max_tokens}: it must be at least 1")
    if not params.temperature >= 0.0:
        raise Refused(f"temperature = {params.temperature}: it must be 0 or more")
    if not 0.0 < params.top_p <= 1.0:
        raise Refused(f"top_p = {params.top_p}: it must be above 0 and at most 1, which switches it off")
    if params.top_k < -1:
        raise Refused(f"top_k = {params.top_k}: it must be at least 1, or 0 to switch it off")
    if params.logprobs != 0:
        raise Refused(f"logprobs = {params.logprobs}: this engine gives the sampled token's alone, ask for 0")
    if params.prompt_logprobs not in (None, 0):
        raise Refused(
            f"prompt_logprobs = {params.prompt_logprobs}: this engine gives the prompt's own alone, ask for 0"
        )
    if not 0 <= params.routed_experts_prompt_start <= len(token_ids):
        raise Refused(
            f"routed_experts_prompt_start = {params.routed_experts_prompt_start}: the prompt has {len(token_ids)} "
            "tokens, skip that many at most"
        )
    if any(not text for text in params.stop):
        raise Refused("stop holds an empty string: leave it out")
    if forced is not None and not forced:
        raise Refused("forced_token_ids is empty: send at least one token or leave it out")
    if forced is not None and (wrong := _outside(forced, vocabulary)) is not None:
        raise Refused(f"forced_token_ids holds {wrong}: the vocabulary has ids 0 to {vocabulary - 1}")


def _outside(ids: list[int], vocabulary: int) -> int | None:
    if min(ids) >= 0 and max(ids) < vocabulary:
        return None
    return next(index for index in ids if not 0 <= index < vocabulary)


def _no_text(ids: Sequence[int]) -> str:
    return ""


async def open_engine(folder: Path, options: EngineOptions) -> EmbeddedEngine:
    """An engine that serves the weights of `folder`."""
    read_shape(folder)
    engine = EmbeddedEngine(options)
    await engine.load(folder)
    return engine

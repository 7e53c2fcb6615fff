"""One call to the engine: what was asked, and what there is of the answer."""

import random

import torch

from openforge.engine.guide import Guide
from openforge.engine.routed import Routed
from openforge.engine.rows import Row
from openforge.engine.sampler import Draw
from openforge.engine.stopping import Ended, StopRule
from openforge.wire.generate import SamplingParams, WeightVersionSpan


class Request:
    """One call. The lists grow while it runs; `ended` is set with the last token."""

    def __init__(
        self,
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        rule: StopRule,
        guide: Guide | None = None,
    ) -> None:
        self.id = request_id
        self.prompt = prompt
        self.params = params
        self.rule = rule
        self.guide = guide
        self.sampled: list[int] = []
        self.logprobs: list[float] = []
        self.spans: list[WeightVersionSpan] = []
        self.ended: Ended | None = None
        self.cached_tokens = 0
        self.routed = Routed()
        self.row: Row | None = None
        self.shared: torch.Tensor | None = None
        self.shared_key: tuple[int, int] = (0, 0)
        self._luck = random.Random(params.seed)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.sampled

    @property
    def last_token(self) -> int:
        return self.sampled[-1] if self.sampled else self.prompt[-1]

    def draw(self) -> Draw:
        """What decides its next token."""
        forced = self.params.forced_token_ids
        return Draw(
            temperature=self.params.temperature,
            top_k=self.params.top_k,
            top_p=self.params.top_p,
            uniform=self._luck.random(),
            forced=forced[len(self.sampled)] if forced is not None else None,
            allowed=self.guide.allowed() if self.guide is not None else None,
        )

    def take(self, token: int, logprob: float, version: str) -> None:
        if self.guide is not None:
            self.guide.take(token)
        self.sampled.append(token)
        self.logprobs.append(logprob)
        count = len(self.sampled)
        if self.spans and self.spans[-1].version == version:
            self.spans[-1].end = count
        else:
            self.spans.append(WeightVersionSpan(version=version, start=count - 1, end=count))
        self.ended = self.rule.ended(self.sampled)

"""The engine's wire: vLLM's `/inference/v1/generate` and weight update calls, as far as we use them.

Source: vLLM 0.32 (entrypoints, scale-out API). The embedded engine speaks the same shapes.
"""

from typing import Literal

import msgspec


class StructuredOutputs(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What the answer has to match, one of both: `json` is a JSON schema as text, `grammar` is in llguidance's Lark."""

    json: str | None = None
    grammar: str | None = None


class SamplingParams(msgspec.Struct, kw_only=True):
    """Always sent whole: vLLM's own defaults are others.

    `logprobs` 0: only the sampled token's. `ignore_eos` goes on after the model's end token, for benchmarks;
    `prompt_logprobs` 0 asks for the prompt's own, temperature 1. `routed_experts_prompt_start`: so many of the prompt's
    tokens are left out where the engine says which experts tokens went through. `forced_token_ids` is the embedded
    engine's own: the answer to give, for conformance runs with forced decoding.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    logprobs: int = 0
    ignore_eos: bool = False
    prompt_logprobs: int | None = None
    routed_experts_prompt_start: int = 0
    forced_token_ids: list[int] | None = None
    structured_outputs: StructuredOutputs | None = None


class GenerateRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    model: str
    token_ids: list[int]
    sampling_params: SamplingParams
    request_id: str = ""
    return_token_ids: bool = False
    cache_salt: str = ""
    stream: bool = False


class WrittenRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A `GenerateRequest` whose ids are JSON text already, for callers that keep the text of a growing prompt."""

    model: str
    token_ids: msgspec.Raw
    sampling_params: SamplingParams
    request_id: str = ""
    return_token_ids: bool = False
    cache_salt: str = ""
    stream: bool = False


class TokenLogprob(msgspec.Struct, kw_only=True):
    token_id: int
    logprob: float


class Logprobs(msgspec.Struct, kw_only=True):
    content: list[TokenLogprob] = []


class WeightVersionSpan(msgspec.Struct, kw_only=True):
    """Sampled tokens [start, end) of one answer came from `version`, a decimal string of ours."""

    version: str
    start: int
    end: int


class Choice(msgspec.Struct, kw_only=True):
    """`routed_experts` comes with the end, from engines that were started with it: an .npy file in base64, unsigned
    integers (tokens, layers, experts per token) of all tokens of prompt and answer but the last one, which was not
    computed, from `routed_experts_prompt_start` on.
    """

    index: int = 0
    finish_reason: Literal["stop", "length", "abort"] | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] = []
    logprobs: Logprobs | None = None
    weight_versions: list[WeightVersionSpan] | None = None
    routed_experts: str | None = None


class PromptLogprob(msgspec.Struct, kw_only=True):
    logprob: float


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    """`cached_tokens` of the prompt were not computed for this call."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = None


class GenerateResponse(msgspec.Struct, kw_only=True):
    """The whole answer, or one streamed chunk of it: then `weight_versions` comes with the last chunk.

    `prompt_logprobs` has one entry a prompt token, keyed by the id as a string; the first is null.
    """

    request_id: str = ""
    model: str = ""
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None
    choices: list[Choice] = []
    usage: Usage | None = None


class WeightInfo(msgspec.Struct, kw_only=True):
    weight_version: str

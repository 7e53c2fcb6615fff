"""Which experts tokens went through, against the routers of the reference implementation."""

import base64
import io
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from reference_model import assert_chosen_by, largest_difference, reference_logprobs, reference_router_probabilities

from openforge.engine.batching import Batch, Limits, Served
from openforge.engine.checkpoint import read_shape, read_tensors
from openforge.engine.llama import Llama
from openforge.engine.request import Request
from openforge.engine.routed import Routed, written
from openforge.engine.stopping import StopRule
from openforge.models import tiny
from openforge.wire.generate import SamplingParams

_LUCK = random.Random(5)
PROMPT = [_LUCK.randrange(3, 259) for _ in range(150)]
LIMITS = Limits(requests=6, fill_tokens=64, routed_experts=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two mixtures of one shape: two versions."""
    root = tmp_path_factory.mktemp("models")
    return [tiny(root / f"v{seed}", seed=seed, experts=8) for seed in (0, 1)]


@pytest.fixture(autouse=True)
def without_gradients() -> object:
    with torch.inference_mode():
        yield


def _served(folder: Path, version: str, *, batch_invariant: bool = False) -> Served:
    shape = read_shape(folder)
    model = Llama(shape, read_tensors(folder, shape), torch.float32, batch_invariant=batch_invariant)
    return Served(model, version)


def _request(prompt: list[int], longest: int, seed: int) -> Request:
    none: frozenset[int] = frozenset()
    rule = StopRule(end_token_ids=none, stop_token_ids=none, stop=(), longest=longest, decode=lambda ids: "")
    return Request(f"r{seed}", prompt, SamplingParams(max_tokens=longest, seed=seed), rule)


def _finish(batch: Batch) -> None:
    for _ in range(2000):
        if not batch.running + batch.waiting:
            return
        batch.step()
    pytest.fail("requests that never end")


def _assert_true(request: Request, folder: Path) -> None:
    rows = request.routed.first()
    assert rows is not None
    assert (rows.shape, rows.dtype) == ((len(request.tokens) - 1, 2, 2), np.uint8)
    assert_chosen_by(reference_router_probabilities(folder, request.tokens[:-1]), rows)
    assert largest_difference(request.logprobs, reference_logprobs(folder, request.prompt, request.sampled)) < 1e-4


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_every_token_is_recorded_whoever_computed_it(folders: list[Path], batch_invariant: bool) -> None:
    served = _served(folders[0], "0", batch_invariant=batch_invariant)
    batch = Batch(served, Limits(requests=6, fill_tokens=64, routed_experts=True, batch_invariant=batch_invariant))
    prompts = [PROMPT, PROMPT, [*PROMPT[:90], 9, 8, 7], PROMPT[:40], [PROMPT[0]], [*PROMPT, 5]]
    first = [_request(prompt, 7 + index, index) for index, prompt in enumerate(prompts)]
    for request in first:
        batch.add(request)
    _finish(batch)
    more = [_request([*request.tokens, 33, 44], 5, 100 + index) for index, request in enumerate(first)]
    for request in more:
        batch.add(request)
    _finish(batch)
    assert batch.counters.prefix_hits > 0
    for request in first + more:
        _assert_true(request, folders[0])


def test_a_cache_too_small_for_any_prompt_loses_no_row(folders: list[Path]) -> None:
    batch = Batch(_served(folders[0], "0"), Limits(requests=2, fill_tokens=64, cache_tokens=8, routed_experts=True))
    requests = [_request(PROMPT, 6, seed) for seed in range(3)]
    for request in requests:
        batch.add(request)
    _finish(batch)
    for request in requests:
        _assert_true(request, folders[0])


def test_what_was_sampled_before_other_weights_came_keeps_its_experts(folders: list[Path]) -> None:
    batch = Batch(_served(folders[0], "0"), LIMITS)
    request = _request(PROMPT, 30, 1)
    batch.add(request)
    while len(request.sampled) < 12:
        batch.step()
    batch.swap(_served(folders[1], "1"))
    _finish(batch)
    rows = request.routed.first()
    assert rows is not None
    until = len(PROMPT) + 12 - 1
    assert len(rows) == len(request.tokens) - 1
    assert_chosen_by(reference_router_probabilities(folders[0], request.tokens[:until]), rows[:until])
    assert_chosen_by(reference_router_probabilities(folders[1], request.tokens[:-1])[until:], rows[until:])
    again = _request(PROMPT, 1, 2)
    batch.add(again)
    _finish(batch)
    assert again.cached_tokens == len(PROMPT) - 1, "what the new weights computed of it is remembered"
    _assert_true(again, folders[1])


def test_layers_without_experts_have_zeros(folders: list[Path], tmp_path: Path) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig.from_pretrained(folders[0], mlp_only_layers=[0])
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    batch, request = Batch(_served(tmp_path, "0"), LIMITS), _request(PROMPT, 6, 1)
    batch.add(request)
    _finish(batch)
    rows = request.routed.first()
    assert rows is not None
    assert not rows[:, 0].any()
    assert_chosen_by(reference_router_probabilities(tmp_path, request.tokens[:-1]), rows[:, 1:])


def test_nothing_is_recorded_unless_asked(folders: list[Path]) -> None:
    batch = Batch(_served(folders[0], "0"), Limits())
    request = _request(PROMPT, 3, 1)
    batch.add(request)
    _finish(batch)
    assert request.routed.first() is None


def test_rows_travel_as_a_file_of_numpy() -> None:
    routed = Routed()
    rows = np.arange(24, dtype=np.uint16).reshape(4, 3, 2)
    routed.add(rows[:3])
    routed.begin_anew()
    routed.add(rows[:2] + 100)
    routed.add(rows[2:])
    first = routed.first()
    assert first is not None
    read = np.load(io.BytesIO(base64.b64decode(written(first))), allow_pickle=False)
    assert read.dtype == np.uint16
    assert read.tolist() == rows.tolist()

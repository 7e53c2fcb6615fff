"""Continuous batching in float32 on a tiny model, against a full recomputation of every sequence."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from reference_model import largest_difference, reference_logprobs

from openforge.engine.batching import Batch, Limits, Served
from openforge.engine.checkpoint import read_shape, read_tensors
from openforge.engine.llama import Llama
from openforge.engine.request import Request
from openforge.engine.stopping import Ended, StopRule
from openforge.models import tiny
from openforge.wire.generate import SamplingParams, WeightVersionSpan

EXACT = 1e-4


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two tiny models of one shape: two versions."""
    root = tmp_path_factory.mktemp("models")
    return [tiny(root / f"v{seed}", seed=seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def models(folders: list[Path]) -> list[Llama]:
    return [Llama(shape := read_shape(folder), read_tensors(folder, shape), torch.float32) for folder in folders]


@pytest.fixture(autouse=True)
def without_gradients() -> object:
    with torch.inference_mode():
        yield


def _ids(luck: random.Random, count: int) -> list[int]:
    return [luck.randrange(3, 259) for _ in range(count)]


def _request(
    name: str,
    prompt: list[int],
    longest: int = 20,
    forced: list[int] | None = None,
    seed: int | None = None,
    t: float = 1.0,
) -> Request:
    params = SamplingParams(max_tokens=longest, forced_token_ids=forced, seed=seed, temperature=t)
    longest = longest if forced is None else len(forced)
    rule = StopRule(
        end_token_ids=frozenset(), stop_token_ids=frozenset(), stop=(), longest=longest, decode=lambda ids: ""
    )
    return Request(name, prompt, params, rule)


def _finish(batch: Batch, steps: int = 2000) -> None:
    while batch.running or batch.waiting:
        batch.step()
        steps -= 1
        assert steps, "requests that never end"


def _assert_true(requests: Sequence[Request], folder: Path, temperature: float = 1.0) -> None:
    for request in requests:
        expected = reference_logprobs(folder, request.prompt, request.sampled, temperature)
        assert largest_difference(request.logprobs, expected) < EXACT


def test_thirty_two_requests_of_all_lengths_have_the_logprobs_of_a_full_recomputation(
    folders: list[Path], models: list[Llama]
) -> None:
    luck = random.Random(1)
    batch = Batch(Served(models[0], "0"), Limits(requests=24, fill_tokens=40))
    system = _ids(luck, 70)
    prompts = [system + _ids(luck, luck.randrange(0, 90)) for _ in range(10)] + [_ids(luck, n) for n in (1, 2, 200)]
    requests = [_request(str(i), prompts[i % len(prompts)], luck.randrange(1, 150)) for i in range(32)]
    for request in requests[:20]:
        batch.add(request)
    for _ in range(7):
        batch.step()
    for request in requests[20:]:
        batch.add(request)
    _finish(batch)
    assert all(len(request.sampled) == request.rule.longest for request in requests)
    _assert_true(requests, folders[0])


def test_the_logprob_is_that_of_the_scaled_distribution(folders: list[Path], models: list[Llama]) -> None:
    batch = Batch(Served(models[0], "0"), Limits())
    request = _request("a", [1, 7, 9], t=0.6)
    batch.add(request)
    _finish(batch)
    _assert_true([request], folders[0], temperature=0.6)


def test_a_groups_prompt_is_computed_once(models: list[Llama]) -> None:
    batch = Batch(Served(models[0], "0"), Limits())
    prompt = _ids(random.Random(2), 101)
    for member in range(8):
        batch.add(_request(str(member), prompt))
    _finish(batch)
    assert batch.counters.prefix_queries == 8 * 100
    assert batch.counters.prefix_hits == 7 * 100


def test_the_next_turn_of_a_conversation_computes_its_new_tokens_alone(
    folders: list[Path], models: list[Llama]
) -> None:
    batch = Batch(Served(models[0], "0"), Limits())
    first = _request("turn-0", _ids(random.Random(3), 50))
    batch.add(first)
    _finish(batch)
    second = _request("turn-1", first.tokens + _ids(random.Random(4), 10))
    batch.add(second)
    _finish(batch)
    assert second.cached_tokens == 50 + 20 - 1
    _assert_true([first, second], folders[0])


def test_after_a_change_of_weights_every_token_is_the_new_weights_own(folders: list[Path], models: list[Llama]) -> None:
    luck = random.Random(5)
    batch = Batch(Served(models[0], "0"), Limits(fill_tokens=64))
    system = _ids(luck, 60)
    requests = [_request(str(i), system + _ids(luck, 5 * i), longest=40) for i in range(6)]
    for request in requests:
        batch.add(request)
    for _ in range(12):
        batch.step()
    late = _request("late", [*system, 3, 4, 5], longest=10)
    batch.swap(Served(models[1], "1"))
    batch.add(late)
    _finish(batch)
    switched = 0
    for request in [*requests, late]:
        old = sum(span.end - span.start for span in request.spans if span.version == "0")
        assert [span.version for span in request.spans] == (["0", "1"] if old else ["1"])
        assert (request.spans[0].start, request.spans[-1].end) == (0, len(request.sampled))
        expected = reference_logprobs(folders[0], request.prompt, request.sampled)[:old]
        expected += reference_logprobs(folders[1], request.prompt, request.sampled)[old:]
        assert largest_difference(request.logprobs, expected) < EXACT
        switched += bool(old)
    assert switched >= 4


def test_a_prefix_of_other_weights_is_never_read(folders: list[Path], models: list[Llama]) -> None:
    batch = Batch(Served(models[0], "0"), Limits())
    prompt = _ids(random.Random(6), 80)
    for version in (0, 1, 0):
        batch.swap(Served(models[version], str(version)))
        request = _request(str(version), prompt)
        batch.add(request)
        _finish(batch)
        assert request.cached_tokens == 0
        _assert_true([request], folders[version])


def test_forced_decoding_returns_the_given_ids_and_their_true_logprobs(
    folders: list[Path], models: list[Llama]
) -> None:
    batch = Batch(Served(models[0], "0"), Limits())
    answer = _ids(random.Random(7), 33)
    request = _request("a", [1, 2, 3, 4], forced=answer, t=0.0)
    batch.add(request)
    _finish(batch)
    assert request.sampled == answer
    _assert_true([request], folders[0])


def test_a_seed_gives_the_same_answer_whatever_runs_beside_it(models: list[Llama]) -> None:
    luck = random.Random(8)
    prompt = _ids(luck, 30)
    alone, together = _request("a", prompt, seed=11), _request("b", prompt, seed=11)
    batch = Batch(Served(models[0], "0"), Limits())
    batch.add(alone)
    _finish(batch)
    batch.add(_request("x", _ids(luck, 90), longest=50))
    batch.step()
    batch.add(together)
    batch.add(_request("y", _ids(luck, 9)))
    _finish(batch)
    assert together.sampled == alone.sampled


def test_a_batch_invariant_engine_repeats_an_answer_to_the_bit_whatever_runs_beside_it(folders: list[Path]) -> None:
    shape = read_shape(folders[0])
    model = Llama(shape, read_tensors(folders[0], shape), torch.float32, batch_invariant=True)
    luck = random.Random(12)
    system = _ids(luck, 140)
    prompts = [system + _ids(luck, n) for n in (1, 30, 52, 53, 100)] + [_ids(luck, n) for n in (1, 64, 65, 190)]
    alone = [_answered(model, [_request("a", prompt, seed=i)])[0] for i, prompt in enumerate(prompts)]
    for order in range(2):
        requests = [_request(str(i), prompt, seed=i) for i, prompt in enumerate(prompts)]
        random.Random(order).shuffle(requests)
        together = sorted(_answered(model, requests, others=luck), key=lambda request: int(request.id))
        assert [request.sampled for request in together] == [request.sampled for request in alone]
        assert [request.logprobs for request in together] == [request.logprobs for request in alone]
        assert max(request.cached_tokens for request in together) >= 128
    _assert_true(alone, folders[0])


def _answered(model: Llama, requests: list[Request], others: random.Random | None = None) -> list[Request]:
    """`requests`, answered by a batch of their own, beside `others` of any length, each a step later than the last."""
    batch = Batch(Served(model, "0"), Limits(requests=9, fill_tokens=100, batch_invariant=True))
    for request in requests:
        batch.add(request)
        if others is not None:
            batch.add(_request("x", _ids(others, others.randrange(1, 150)), others.randrange(1, 40), seed=1))
            batch.step()
    _finish(batch)
    return requests


def test_aborted_requests_keep_what_they_have_and_the_others_go_on(folders: list[Path], models: list[Llama]) -> None:
    luck = random.Random(9)
    batch = Batch(Served(models[0], "0"), Limits(requests=3))
    prompts = [_ids(luck, 20 + i) for i in range(5)]
    requests = [_request(str(i), prompt, longest=30) for i, prompt in enumerate(prompts)]
    for request in requests:
        batch.add(request)
    for _ in range(8):
        batch.step()
    gone = batch.abort(lambda request: request.id in {"0", "4"})
    assert [request.id for request in gone] == ["4", "0"]
    assert all(request.ended == Ended("abort") for request in gone)
    assert 0 < len(requests[0].sampled) == len(requests[0].logprobs) == requests[0].spans[-1].end
    _finish(batch)
    assert [request.ended for request in requests[1:4]] == [Ended("length")] * 3
    _assert_true([requests[0], *requests[1:4]], folders[0])


def test_a_prompt_of_an_aborted_request_is_computed_by_who_waited_for_it(
    folders: list[Path], models: list[Llama]
) -> None:
    batch = Batch(Served(models[0], "0"), Limits(fill_tokens=10))
    prompt = _ids(random.Random(10), 60)
    first, second = _request("first", prompt), _request("second", prompt)
    batch.add(first)
    batch.add(second)
    batch.step()
    batch.abort(lambda request: request is first)
    _finish(batch)
    _assert_true([second], folders[0])


def test_without_any_cache_everything_is_still_true(folders: list[Path], models: list[Llama]) -> None:
    batch = Batch(Served(models[0], "0"), Limits(cache_tokens=10, fill_tokens=16))
    prompt = _ids(random.Random(11), 50)
    requests = [_request(str(i), prompt) for i in range(4)]
    for request in requests:
        batch.add(request)
    _finish(batch)
    _assert_true(requests, folders[0])


def test_a_new_name_for_the_same_weights_begins_a_new_span(models: list[Llama]) -> None:
    batch = Batch(Served(models[0], "7"), Limits())
    request = _request("a", [1, 2, 3], longest=6)
    batch.add(request)
    for _ in range(4):
        batch.step()
    batch.rename("8")
    _finish(batch)
    taken = request.spans[0].end
    assert request.spans == [
        WeightVersionSpan(version="7", start=0, end=taken),
        WeightVersionSpan(version="8", start=taken, end=6),
    ]

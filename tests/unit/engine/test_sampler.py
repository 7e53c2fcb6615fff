"""Drawing tokens: the frequencies are those of the stated log-probs, and the log-probs those of what is drawn from."""

import math
import random

import pytest
import torch

from openforge.engine.sampler import IMPOSSIBLE, Draw, sample

LOGITS = torch.tensor([2.0, 1.0, 0.5, -1.0, -3.0])


def _draw(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, uniform: float = 0.5, **more: int) -> Draw:
    return Draw(temperature=temperature, top_k=top_k, top_p=top_p, uniform=uniform, forced=more.get("forced"))


def _many(count: int, **settings: float) -> tuple[list[int], list[float]]:
    luck = random.Random(0)
    draws = [_draw(uniform=luck.random(), **settings) for _ in range(count)]  # type: ignore[arg-type]
    return sample(LOGITS.repeat(count, 1), draws)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 3},
        {"top_p": 0.8},
        {"top_k": 4, "top_p": 0.9, "temperature": 1.5},
    ],
)
def test_tokens_come_as_often_as_their_logprob_says(settings: dict[str, float]) -> None:
    count = 20_000
    ids, logprobs = _many(count, **settings)
    stated = dict(zip(ids, logprobs, strict=True))
    assert math.isclose(sum(math.exp(logprob) for logprob in stated.values()), 1.0, abs_tol=2e-3)
    for token, logprob in stated.items():
        assert abs(ids.count(token) / count - math.exp(logprob)) < 0.015


def test_top_k_and_top_p_keep_the_likeliest_tokens_alone() -> None:
    assert set(_many(2000, top_k=2)[0]) == {0, 1}
    assert set(_many(2000, top_p=0.7)[0]) == {0, 1}
    assert set(_many(2000, top_p=0.001)[0]) == {0}


def test_top_p_counts_over_what_top_k_left() -> None:
    probs = LOGITS.softmax(0)
    just_above_first_of_two = float(probs[0] / (probs[0] + probs[1])) + 1e-3
    assert set(_many(2000, top_k=2, top_p=just_above_first_of_two)[0]) == {0, 1}
    assert set(_many(2000, top_k=2, top_p=just_above_first_of_two - 2e-3)[0]) == {0}


def test_top_p_is_right_where_the_likeliest_tokens_weigh_little() -> None:
    nearly_flat = torch.linspace(0.1, 0.0, 4000)[None]
    kept = int((nearly_flat[0].softmax(0).cumsum(0) < 0.9).sum()) + 1
    ids, logprobs = sample(nearly_flat.clone(), [_draw(top_p=0.9, uniform=math.nextafter(1.0, 0.0))])
    assert abs(ids[0] - (kept - 1)) <= 1
    assert math.isclose(logprobs[0], float(nearly_flat[0, :kept].log_softmax(0)[ids[0]]), abs_tol=1e-3)


def test_temperature_zero_takes_the_likeliest_and_states_its_unscaled_logprob() -> None:
    ids, logprobs = sample(LOGITS[None].clone(), [_draw(temperature=0.0, top_k=1, uniform=0.99)])
    assert ids == [0]
    assert math.isclose(logprobs[0], float(LOGITS.log_softmax(0)[0]), abs_tol=1e-6)


def test_a_forced_token_is_taken_with_its_true_logprob() -> None:
    draws = [_draw(temperature=0.5, forced=3), _draw(top_k=2, forced=4)]
    ids, logprobs = sample(LOGITS.repeat(2, 1), draws)
    assert ids == [3, 4]
    assert math.isclose(logprobs[0], float((LOGITS / 0.5).log_softmax(0)[3]), abs_tol=1e-6)
    assert logprobs[1] == IMPOSSIBLE


def test_each_row_is_drawn_by_its_own_settings() -> None:
    draws = [_draw(uniform=0.9999), _draw(temperature=0.0), _draw(top_k=1, uniform=0.9999), _draw(uniform=0.0)]
    ids, _ = sample(LOGITS.repeat(4, 1), draws)
    assert ids == [4, 0, 0, 0]


def test_the_last_sliver_of_luck_never_picks_an_excluded_token() -> None:
    almost_one = math.nextafter(1.0, 0.0)
    ids, logprobs = sample(LOGITS[None].clone(), [_draw(top_k=2, uniform=almost_one)])
    assert ids == [1]
    assert logprobs[0] > IMPOSSIBLE

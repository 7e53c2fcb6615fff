"""Every loss against a second implementation of its formula, in float64, with gradients; and the traps of each."""

import math
import random

import pytest
import reference_losses as reference
import torch

from openforge.learner import loss
from openforge.learner.objective import LossTokens, correction_weights, token_losses
from openforge.runs.config import AlgorithmSection

N, SEQUENCES = 48, 7

CASES: dict[str, tuple[dict[str, object], reference.Losses]] = {
    "reinforce, token weights": ({}, reference.reinforce(reference.token_tis(2.0))),
    "reinforce, sequence weights": (
        {"correction": "sequence_tis", "ratio_cap": 5.0},
        reference.reinforce(reference.sequence_tis(5.0)),
    ),
    "reinforce, icepop": ({"correction": "icepop"}, reference.reinforce(reference.icepop(0.5, 2.0))),
    "ppo": ({"loss": "ppo_clip"}, reference.ppo(0.2, 0.28)),
    "ppo, dual clip": ({"loss": "ppo_clip", "dual_clip": 3.0}, reference.ppo(0.2, 0.28, 3.0)),
    "gspo": ({"loss": "gspo", "clip_low": 3e-2, "clip_high": 4e-2}, reference.gspo(3e-2, 4e-2)),
    "cispo": ({"loss": "cispo", "clip_low": 1.0, "clip_high": 4.0}, reference.cispo(1.0, 4.0)),
    "cispo, both bounds": ({"loss": "cispo"}, reference.cispo(0.2, 0.28)),
    "dppo": ({"loss": "dppo_tv", "ratio_cap": 20.0}, reference.dppo_tv(0.2, 0.28, 20.0)),
    "decoupled ppo, token weights": (
        {"loss": "ppo_clip", "objective": "decoupled"},
        reference.weighted(reference.ppo(0.2, 0.28), reference.token_tis(2.0)),
    ),
    "decoupled ppo, sequence weights": (
        {"loss": "ppo_clip", "objective": "decoupled", "correction": "sequence_tis"},
        reference.weighted(reference.ppo(0.2, 0.28), reference.sequence_tis(2.0)),
    ),
    "decoupled ppo, icepop": (
        {"loss": "ppo_clip", "objective": "decoupled", "correction": "icepop"},
        reference.weighted(reference.ppo(0.2, 0.28), reference.icepop(0.5, 2.0)),
    ),
    "decoupled ppo, no weight": (
        {"loss": "ppo_clip", "objective": "decoupled", "correction": "none"},
        reference.ppo(0.2, 0.28),
    ),
    "decoupled gspo": (
        {"loss": "gspo", "objective": "decoupled", "clip_low": 3e-2, "clip_high": 4e-2},
        reference.weighted(reference.gspo(3e-2, 4e-2), reference.token_tis(2.0)),
    ),
    **{
        f"ppo with {kind}": (
            {"loss": "ppo_clip", "kl_coefficient": 0.3, "kl_estimator": kind},
            reference.with_kl(reference.ppo(0.2, 0.28), 0.3, kind),
        )
        for kind in ("k1", "k2", "k3", "k3_plus")
    },
}


def made_up(seed: int, *, decoupled: bool) -> tuple[list[float], reference.Case]:
    rng = random.Random(seed)
    mu = [-rng.uniform(0.01, 3.0) for _ in range(N)]
    old = [one + rng.gauss(0, 0.4) for one in mu] if decoupled else mu
    pi = [min(one + rng.gauss(0, 0.5), -1e-3) for one in old]
    return pi, reference.Case(
        mu=mu,
        old=old,
        reference=[one + rng.gauss(0, 0.3) for one in pi],
        advantage=[0.0 if n % 7 == 0 else rng.gauss(0, 1) for n in range(N)],
        sequence=sorted(rng.randrange(SEQUENCES) for _ in range(N)),
    )


def tokens_of(pi: torch.Tensor, case: reference.Case, algorithm: AlgorithmSection) -> LossTokens:
    def real(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    return LossTokens(
        logprobs_N=pi,
        mu_logprobs_N=real(case.mu),
        advantages_N=real(case.advantage),
        sequence_N=torch.tensor(case.sequence),
        proximal_N=real(case.old) if algorithm.objective == "decoupled" else None,
        reference_N=real(case.reference) if algorithm.kl_coefficient else None,
    )


@pytest.mark.parametrize("name", CASES)
def test_a_loss_and_its_gradient_are_those_of_its_formula(name: str) -> None:
    settings, formula = CASES[name]
    algorithm = AlgorithmSection(**settings)  # type: ignore[arg-type]
    pi, case = made_up(3, decoupled=algorithm.objective == "decoupled")
    weights = [random.Random(n).uniform(0.1, 1.0) for n in range(N)]
    logprobs = torch.tensor(pi, dtype=torch.float64, requires_grad=True)
    losses = token_losses(algorithm, tokens_of(logprobs, case, algorithm))
    (losses * torch.tensor(weights, dtype=torch.float64)).sum().backward()
    assert losses.tolist() == pytest.approx(formula(pi, pi, case), abs=1e-10)
    assert logprobs.grad.tolist() == pytest.approx(reference.gradient(formula, pi, case, weights), abs=1e-6)


def test_value_loss_is_its_formula_with_its_gradient() -> None:
    rng = random.Random(5)
    before = [rng.gauss(0, 1) for _ in range(N)]
    values = [one + rng.gauss(0, 0.4) for one in before]
    returns = [rng.gauss(0, 1) for _ in range(N)]
    moving = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    losses = loss.value_loss(moving, torch.tensor(before).double(), torch.tensor(returns).double(), 0.2)
    losses.sum().backward()
    before, returns = torch.tensor(before).double().tolist(), torch.tensor(returns).double().tolist()
    assert losses.tolist() == pytest.approx(reference.value_losses(values, before, returns, 0.2), abs=1e-12)
    for n in range(N):
        above, below = [*values], [*values]
        above[n], below[n] = values[n] + 1e-6, values[n] - 1e-6
        slope = (
            reference.value_losses(above, before, returns, 0.2)[n]
            - reference.value_losses(below, before, returns, 0.2)[n]
        ) / 2e-6
        assert moving.grad[n].item() == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize("name", [name for name in CASES if "decoupled" not in name and "with" not in name])
def test_on_policy_every_loss_has_the_policy_gradient(name: str) -> None:
    algorithm = AlgorithmSection(**CASES[name][0])  # type: ignore[arg-type]
    advantages = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    logprobs = torch.tensor([-1.0, -0.2, -3.0], dtype=torch.float64, requires_grad=True)
    tokens = LossTokens(logprobs, logprobs.detach(), advantages, torch.tensor([0, 0, 1]))
    token_losses(algorithm, tokens).sum().backward()
    assert logprobs.grad.tolist() == pytest.approx((-advantages).tolist(), abs=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_extreme_ratios_stay_finite(name: str) -> None:
    algorithm = AlgorithmSection(**CASES[name][0])  # type: ignore[arg-type]
    low, high = -0.001, -1000.0
    logprobs = torch.tensor([low, high], requires_grad=True)
    other = torch.tensor([high, low])
    for advantages in (torch.ones(2), -torch.ones(2)):
        tokens = LossTokens(
            logprobs,
            other,
            advantages,
            torch.tensor([0, 1]),
            other.clone() if algorithm.objective == "decoupled" else None,
            other if algorithm.kl_coefficient else None,
        )
        losses = token_losses(algorithm, tokens)
        (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
        assert torch.isfinite(losses).all()
        assert torch.isfinite(gradient).all()


def test_log_ratios_are_bounded_at_20_and_untouched_below() -> None:
    found = loss.log_ratio(torch.tensor([0.0, 0.0, 30.0, -30.0]), torch.tensor([19.5, -19.5, 0.0, 0.0]))
    assert found.tolist() == [-19.5, 19.5, 20.0, -20.0]


def test_the_ratio_of_a_sequence_is_bounded_at_e_to_the_10_and_untouched_below() -> None:
    own, bad = torch.tensor([0]), torch.tensor([-1.0], dtype=torch.float64)

    def gspo(log_ratio: float) -> float:
        logprobs, old = torch.tensor([0.0], dtype=torch.float64), torch.tensor([-log_ratio], dtype=torch.float64)
        return loss.gspo(logprobs, old, bad, own, 3e-4, 4e-4).item()

    assert gspo(9.5) == pytest.approx(math.exp(9.5))
    assert gspo(30.0) == pytest.approx(math.exp(10.0))


def test_the_correction_is_applied_once() -> None:
    """In bypass the ratio to what sampled is the correction; a second weight would square it."""
    ratio = torch.tensor([math.log(1.1)], dtype=torch.float64)
    tokens = LossTokens(ratio, torch.zeros(1).double(), torch.ones(1).double(), torch.zeros(1, dtype=torch.long))
    algorithm = AlgorithmSection(loss="ppo_clip")
    assert correction_weights(algorithm, tokens) is None
    assert token_losses(algorithm, tokens).item() == pytest.approx(-1.1)
    apart = tokens._replace(proximal_N=ratio)
    assert token_losses(AlgorithmSection(loss="ppo_clip", objective="decoupled"), apart).item() == pytest.approx(-1.1)


def test_weights_carry_no_gradient() -> None:
    for correction in ("token_tis", "sequence_tis", "icepop", "none"):
        logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
        tokens = LossTokens(logprobs, logprobs.detach() - 0.1, torch.ones(2).double(), torch.tensor([0, 0]))
        weights = correction_weights(AlgorithmSection(correction=correction), tokens)  # type: ignore[arg-type]
        assert weights is not None
        assert not weights.requires_grad


def test_icepop_keeps_what_lies_within_the_band() -> None:
    log_rho = torch.tensor([0.4, 0.8, 6.0]).log()
    assert loss.icepop(log_rho, 0.5, 5.0).tolist() == pytest.approx([0.0, 0.8, 0.0])


def test_sequence_weights_are_the_product_over_their_own_sequence() -> None:
    log_rho = torch.tensor([1.5, 0.5, 2.0, 4.0]).log()
    weights = loss.sequence_tis(log_rho, torch.tensor([0, 0, 1, 1]), 5.0)
    assert weights.tolist() == pytest.approx([0.75, 0.75, 5.0, 5.0])


def test_dual_clip_only_bounds_what_is_bad_and_only_where_it_is_asked_for() -> None:
    logprobs, old = torch.tensor([math.log(10.0)] * 2), torch.zeros(2)
    advantages = torch.tensor([-1.0, 1.0])
    assert loss.ppo_clip(logprobs, old, advantages, 0.2, 0.28).tolist() == pytest.approx([10.0, -1.28])
    assert loss.ppo_clip(logprobs, old, advantages, 0.2, 0.28, 3.0).tolist() == pytest.approx([3.0, -1.28])


def test_cispo_clips_from_below_unless_told_otherwise() -> None:
    logprobs, old, advantages = torch.tensor([-1.0]), torch.tensor([0.0]), torch.ones(1)
    assert loss.cispo(logprobs, old, advantages, 0.2, 4.0).item() == pytest.approx(0.8)
    assert loss.cispo(logprobs, old, advantages, 1.0, 4.0).item() == pytest.approx(math.exp(-1.0))


def test_gspo_takes_the_ratio_of_the_whole_sequence() -> None:
    old = torch.zeros(3, dtype=torch.float64)
    logprobs = torch.tensor([0.02, -0.02, 0.5], dtype=torch.float64)
    losses = loss.gspo(logprobs, old, torch.ones(3).double(), torch.tensor([0, 0, 1]), 3e-4, 4e-4)
    assert losses.tolist() == pytest.approx([-1.0, -1.0, -1.0004])


@pytest.mark.parametrize(
    ("advantage", "moved", "trained"),
    [
        (1.0, 0.3, False),
        (1.0, -0.3, True),
        (-1.0, -0.3, False),
        (-1.0, 0.3, True),
        (0.0, -0.3, False),
        (0.0, 0.3, True),
    ],
)
def test_dppo_masks_by_the_sign_of_the_advantage_and_zero_counts_as_negative(
    advantage: float, moved: float, trained: bool
) -> None:
    logprobs = torch.tensor([0.5 + moved]).log().requires_grad_()
    weighed = loss.dppo_tv(logprobs, torch.tensor([0.5]).log(), torch.tensor([advantage]), 0.2, 0.2, 20.0)
    expected = -advantage * (0.5 + moved) / 0.5 * math.log(0.5 + moved) if trained else 0.0
    assert weighed.item() == pytest.approx(expected, abs=1e-6)


def test_k1_has_no_gradient_in_expectation_and_k2_has_that_of_the_kl() -> None:
    """Over a whole vocabulary, weighed by pi; the gradient of KL(pi || ref) is sum pi (log pi - log ref) d log pi."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, generator=generator, dtype=torch.float64, requires_grad=True)
    other = torch.randn(9, generator=generator, dtype=torch.float64).log_softmax(0)
    pi = logits.log_softmax(0)
    true = torch.autograd.grad((pi.exp() * (pi - other)).sum(), logits)[0]
    for estimator, expected in (("k1", torch.zeros_like(true)), ("k2", true), ("k3_plus", true)):
        pi = logits.log_softmax(0)
        sampled = (pi.exp().detach() * loss.kl_term(pi, other, estimator)).sum()  # type: ignore[arg-type]
        assert torch.autograd.grad(sampled, logits)[0].tolist() == pytest.approx(expected.tolist(), abs=1e-12)

"""pass@k and pass^k of one task from its trials, each under the name of its estimator.

`n` trials have a verdict, `c` of them passed. Where `n < k` nothing can be said, and None is returned: a trial
without a verdict is a missing one, never a failure.
"""

from math import comb


def pass_at_k(n: int, c: int, k: int) -> float | None:
    """The chance that at least one of k trials passes: 1 - C(n-c, k) / C(n, k), unbiased.

    Chen et al. 2021, "Evaluating Large Language Models Trained on Code" (arXiv 2107.03374), equation 1.
    """
    return None if n < k else 1.0 - comb(n - c, k) / comb(n, k)


def all_pass_unbiased(n: int, c: int, k: int) -> float | None:
    """pass^k, the chance that all of k trials pass: C(c, k) / C(n, k), unbiased (tau-bench, arXiv 2406.12045)."""
    return None if n < k else comb(c, k) / comb(n, k)


def all_pass_plug_in(n: int, c: int, k: int) -> float | None:
    """pass^k as (c/n)^k: biased upwards for a task that passes now and then, but what some benchmarks report."""
    return None if n < k else (c / n) ** k


ESTIMATORS = {
    "pass@k (unbiased)": pass_at_k,
    "pass^k (unbiased)": all_pass_unbiased,
    "pass^k (plug-in)": all_pass_plug_in,
}

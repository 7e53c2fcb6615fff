"""The pieces of the GPU check that a CPU can compute, on a tiny model; the push is in the tests of vLLM's driver."""

import random

import pytest

from openforge.cli.gpu_check import Answer, Plan, main, parity, sequences_of, sharded
from openforge.models import tiny
from openforge.wire.generate import Choice, Logprobs, TokenLogprob


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return Plan(tiny(tmp_path_factory.mktemp("models") / "m"), cpu=True, requests=3, tokens=12)


def answers_of(plan: Plan, *, off: float = 0.0) -> list[Answer]:
    """Random tokens with the log-probs of the learner in float32, `off` by so much."""
    from openforge.learner.backends.torch_fsdp import TorchBackend

    rng = random.Random(0)

    def answer(prompt: list[int], ids: list[int], logprobs: list[float]) -> Answer:
        content = [TokenLogprob(token_id=i, logprob=value - off) for i, value in zip(ids, logprobs, strict=True)]
        return Answer(prompt, Choice(token_ids=ids, logprobs=Logprobs(content=content)))

    drawn = [
        ([rng.randrange(3, 200) for _ in range(6)], [rng.randrange(3, 200) for _ in range(plan.tokens)])
        for _ in range(plan.requests)
    ]
    unknown = [answer(prompt, ids, [0.0] * len(ids)) for prompt, ids in drawn]
    stated = TorchBackend(plan.config(autocast=False)).logprobs(sequences_of(unknown))
    return [answer(prompt, ids, logprobs) for (prompt, ids), logprobs in zip(drawn, stated, strict=True)]


def test_parity_holds_for_true_logprobs_and_not_for_others(plan: Plan) -> None:
    found = parity(plan, answers_of(plan))
    assert found["ok"]
    assert found["engine"] == {"mean": 0.0, "max": 0.0}
    assert 0 < found["learner"]["mean"] < 0.1
    assert not parity(plan, answers_of(plan, off=1.0))["ok"]


def test_a_step_sharded_over_a_world_of_one_is_the_step_unsharded(plan: Plan) -> None:
    found = sharded(plan, answers_of(plan))
    assert found["ok"], found
    assert found["sharded"]["shards"] > 0
    assert found["plain"]["shards"] == 0


def test_without_a_gpu_it_is_refused_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert capsys.readouterr().err == (
        "openforge: torch sees no CUDA device here: run it where there is a GPU, or with --cpu\n"
    )

"""With which flags a vLLM server of a CPU is started."""

import pytest

from openforge.engine.vllm import _for_cpus


def flags(max_requests: int, *asked: str) -> dict[str, str]:
    told = iter(_for_cpus(max_requests, asked))
    return dict(zip(told, told, strict=True))


@pytest.mark.parametrize(("max_requests", "tokens"), [(4, "128"), (128, "128"), (300, "300")])
def test_a_step_holds_a_token_of_every_request_and_not_much_more(max_requests: int, tokens: str) -> None:
    assert flags(max_requests)["--max-num-batched-tokens"] == tokens


@pytest.mark.parametrize(
    ("asked", "alone"),
    [
        ((), True),
        (("--enforce-eager", "--data-parallel-size=2"), True),
        (("--tensor-parallel-size=2",), False),
        (("--enforce-eager", "-tp", "2"), False),
        (("--tensor_parallel_size=2",), False),
        (("--prefill-context-parallel-size=2",), False),
        (("--pipeline-parallel-size", "2"), False),
        (("--distributed-executor-backend", "mp"), False),
    ],
)
def test_scheduler_and_worker_are_one_process_unless_several_workers_or_an_executor_are_asked_for(
    asked: tuple[str, ...], alone: bool
) -> None:
    assert ("--distributed-executor-backend" in flags(8, *asked)) == alone

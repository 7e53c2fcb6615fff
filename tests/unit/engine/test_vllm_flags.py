"""With which flags a vLLM server of a CPU is started."""

import pytest

from openforge.engine import vllm
from openforge.engine.vllm import _computed_in, _for_cpus


def flags(max_requests: int, *asked: str) -> dict[str, str]:
    told = iter(_for_cpus(max_requests, asked))
    return dict(zip(told, told, strict=True))


@pytest.mark.parametrize(("max_requests", "tokens"), [(4, "128"), (128, "128"), (300, "300")])
def test_a_step_holds_a_token_of_every_request_and_not_much_more(max_requests: int, tokens: str) -> None:
    assert flags(max_requests)["--max-num-batched-tokens"] == tokens


def test_a_step_is_vllms_own_where_it_has_to_hold_a_whole_prompt() -> None:
    assert "--max-num-batched-tokens" not in flags(4, "--no-enable-chunked-prefill")


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


@pytest.mark.parametrize(
    ("processor", "weights", "computed"),
    [
        ("flags : avx2 avx512f", "bfloat16", "float32"),
        ("flags : avx512f avx512_bf16", "bfloat16", "bfloat16"),
        ("flags : amx_bf16 amx_tile", "bfloat16", "bfloat16"),
        ("Features : asimd bf16", "bfloat16", "bfloat16"),
        ("flags : avx2", "float32", "float32"),
    ],
)
def test_bfloat16_is_computed_in_only_where_the_processor_can(
    monkeypatch: pytest.MonkeyPatch, processor: str, weights: str, computed: str
) -> None:
    monkeypatch.setattr(vllm, "_has_accelerator", lambda: False)
    monkeypatch.setattr(vllm, "_processor", lambda: processor)
    assert _computed_in(weights) == computed

"""What an engine's metrics say of how busy it is."""

from openforge.engine.measuring import Load, load_of

OF_TWO = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="policy"} 12.0
vllm:num_requests_running{engine="1",model_name="policy"} 9.0
vllm:num_requests_waiting{engine="0",model_name="policy"} 0.0
vllm:num_requests_waiting{engine="1",model_name="policy"} 3.0
vllm:num_requests_waiting_by_reason{engine="1",model_name="policy",reason="capacity"} 3.0
vllm:kv_cache_usage_perc{engine="0",model_name="policy"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="policy"} 7.5e-01
"""


def test_requests_of_all_engines_of_a_server_are_added_and_the_fullest_memory_counts() -> None:
    assert load_of(OF_TWO) == Load(running=21.0, waiting=3.0, kv_use=0.75)


def test_a_server_that_says_nothing_yet_has_nothing_to_do() -> None:
    assert load_of("# TYPE other gauge\nother 1\n") == Load(running=0.0, waiting=0.0, kv_use=0.0)

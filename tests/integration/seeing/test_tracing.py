"""Traces as a collector gets them, over the wire."""

import asyncio
import os
import sys
from pathlib import Path

import msgspec
import pytest
from otlp_collector import Collector, collecting

from openforge.cli.soak import disturbed

TINY = Path(__file__).parents[3] / "examples" / "tiny.toml"

_PEER = """
import asyncio, json, logging, sys
from openforge.bus import tracing
from openforge.protos import EndReason, EpisodeEnded
from openforge.service import log, set_up_logs
from openforge.service.tracing import set_up_traces

set_up_logs(sys.argv[1])
send = set_up_traces(sys.argv[1])
headers = {}
if sys.argv[1] == "learner":
    links = [tracing.of_attempt("r", f"g-{n}", 0) for n in range(20)]
    with tracing.first_span("batch", tracing.of_version("r", 1), links, version=1):
        with tracing.span("optimizer step"):
            log.info("inside")
            tracing.inject(headers)
else:
    for n in range(20):
        with tracing.span("model call", tracing.of_attempt("r", f"g-{n}", 0), n=n):
            ended, told = EpisodeEnded(run="r", episode=f"g-{n}", attempt=0, reason=EndReason.FINISHED), {}
            tracing.inject(told, ended)
            with tracing.continued("verifier", told, ended):
                pass
            log.info("told", named="traceparent" in told)
send()
"""


async def peer(service: str, collector: Collector, **env: str) -> str:
    """What another process that traces says on standard error."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _PEER, service, stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url} | env,
    )  # fmt: skip
    _, said = await process.communicate()
    assert process.returncode == 0, said.decode()
    return said.decode()


async def test_processes_that_know_only_names_agree_on_ids_and_on_what_is_sampled() -> None:
    half = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.5"}
    with collecting() as collector:
        told = await peer("proxy", collector, **half)
        await peer("proxy", collector, **half)
        said = await peer("learner", collector, **half)
    calls = [span for service, span in collector.spans if span.name == "model call"]
    verdicts = [span for service, span in collector.spans if span.name == "verifier"]
    assert 0 < len(calls) < 40  # a half of them, and the same in both processes
    assert len(calls) == 2 * len({call.trace_id for call in calls}) == len(verdicts)
    assert {call.span_id for call in calls} == {verdict.parent_span_id for verdict in verdicts}
    lines = [msgspec.json.decode(line) for line in told.splitlines() if '"told"' in line]
    named = [line["named"] for line in lines]
    assert (len(named), sum(named)) == (20, len(calls) // 2)  # of others no fact carries a header
    assert ["trace" in line for line in lines] == named  # and no line of a call an id that leads nowhere
    batch = next(span for _, span in collector.spans if span.name == "batch")
    linked = {(link.trace_id, link.span_id) for link in batch.links}
    assert len(linked) == 20
    assert {(call.trace_id, call.parent_span_id) for call in calls} <= linked
    step = next(span for _, span in collector.spans if span.name == "optimizer step")
    assert (step.trace_id, step.parent_span_id) == (batch.trace_id, batch.span_id)
    line = next(msgspec.json.decode(text) for text in said.splitlines() if "inside" in text)
    assert (line["trace"], line["span"]) == (step.trace_id.hex(), step.span_id.hex())


@pytest.mark.heavy
async def test_a_harness_s_call_is_followed_to_the_weight_version_that_it_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        overrides = ("environment.harness=letters", "run.steps=1", "evaluation.heldout_episodes=0")
        async with disturbed(TINY, tmp_path, "traced", overrides) as run, asyncio.timeout(400):
            assert await run.process.wait() == 0, (run.home.root / "train.log").read_text()[-2000:]
    spans = collector.spans
    batch = next(span for _, span in spans if span.name == "batch")
    attempts = {(link.trace_id, link.span_id) for link in batch.links}
    told = [span for service, span in spans if (service, span.name) == ("openforge-scheduler", "attempt")]
    begun = {(span.trace_id, span.span_id) for span in told}
    assert attempts
    assert attempts <= begun
    for trace_id, first in attempts:
        mine = [(service, span) for service, span in spans if span.trace_id == trace_id]
        calls = [span for _, span in mine if span.name == "model call"]
        assert calls
        assert all(call.parent_span_id == first for call in calls)
        assert {"sandbox_manager EpisodeRequested", "proxy EpisodeEnded", "verifier EpisodeSealed"} <= {
            span.name for _, span in mine
        }
    made = {(service, span.name) for service, span in spans if span.trace_id == batch.trace_id}
    assert {
        ("openforge-learner", "optimizer step"),
        ("openforge-learner", "publish"),
        ("openforge-engine", "serve version"),
    } <= made

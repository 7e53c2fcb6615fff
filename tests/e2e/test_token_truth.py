"""What was recorded is what was sampled: whole runs, compared with a full recomputation."""

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from openforge.bus import CAUGHT_UP
from openforge.cli.reach import bus_of
from openforge.cli.soak import Disturbed, disturbed
from openforge.protos import TrajectoryVerified, unpack_ids, unpack_logprobs
from openforge.protos.trajectory import Sequence

ROOT = Path(__file__).parents[2]


async def trajectories_of(run: Disturbed) -> list[TrajectoryVerified]:
    async with bus_of(run.home.run) as bus:
        return [
            told.fact
            async for told in bus.follow(("trajectory",), run=run.home.run, until_now=True)
            if told is not CAUGHT_UP and isinstance(told.fact, TrajectoryVerified)
        ]


async def ends(run: Disturbed, within_s: float) -> None:
    async with asyncio.timeout(within_s):
        exit_code = await run.process.wait()
    assert exit_code == 0, (run.home.root / "train.log").read_text(errors="replace")[-4000:]


def loss_tokens(sequence: Sequence) -> Iterator[tuple[int, float, int]]:
    """Position, recorded log-prob and weight version of each token that is trained."""
    positions = [position for span in sequence.loss for position in range(span.start, span.start + span.length)]
    versions = {
        position: span.version for span in sequence.versions for position in range(span.start, span.start + span.length)
    }
    for position, logprob in zip(positions, unpack_logprobs(sequence.logprobs), strict=True):
        yield position, logprob, versions[position]


@torch.no_grad()
def worst_difference(weights: Path, trajectories: list[TrajectoryVerified]) -> tuple[float, int]:
    """The largest absolute difference to a float32 recomputation under each token's own version; how many tokens."""
    wanted: dict[int, list[tuple[list[int], float, int, float]]] = defaultdict(list)
    for trajectory in trajectories:
        for sequence in trajectory.sequences:
            ids = unpack_ids(sequence.ids)
            for position, logprob, version in loss_tokens(sequence):
                wanted[version].append((ids, trajectory.temperature, position, logprob))
    worst, tokens = 0.0, 0
    for version, items in wanted.items():
        model = AutoModelForCausalLM.from_pretrained(weights / f"v{version:06d}-0", dtype=torch.float32).eval()
        computed: dict[int, torch.Tensor] = {}
        for ids, temperature, position, logprob in items:
            if id(ids) not in computed:
                computed[id(ids)] = torch.log_softmax(model(torch.tensor([ids])).logits[0] / temperature, dim=-1)
            worst = max(worst, abs(float(computed[id(ids)][position - 1, ids[position]]) - logprob))
            tokens += 1
    return worst, tokens


@pytest.mark.heavy
async def test_recorded_log_probs_are_those_of_the_version_that_sampled_each_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = (
        "run.steps=8",
        "engine.dtype=float32",
        "engine.keep_versions=50",
        "environment.harness=letters",
        "evaluation.heldout_episodes=0",
        "sampling.max_tokens=256",  # longer than a step takes, so that weights change inside answers
        "model.context=512",
    )
    async with disturbed(ROOT / "examples/tiny.toml", tmp_path, "truth", overrides) as run:
        await ends(run, within_s=900)
    monkeypatch.setenv("OPENFORGE_RUNS", str(tmp_path))
    trajectories = await trajectories_of(run)
    worst, tokens = worst_difference(run.home.root / "weights", trajectories)
    straddling = [t for t in trajectories if any(len(sequence.versions) > 1 for sequence in t.sequences)]
    assert len(trajectories) >= 64
    assert straddling, "no weight change fell into an answer"
    assert tokens > 10_000
    assert worst < 1e-3
    assert all(trajectory.delivered_fraction == 1.0 for trajectory in trajectories)


@pytest.mark.heavy
async def test_five_turns_with_the_real_model_are_one_sequence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = (
        "run.steps=2",
        f"environment.name={ROOT / 'tests/support/talk_env/env.py'}",
        "environment.harness=talk",
        "environment.tasks=[]",
        "environment.options={}",
        "pacing.groups_per_step=2",
        "pacing.group_size=4",
        "pacing.in_flight=8",
        "sampling.max_tokens=24",
        "engine.dtype=float32",
        "engine.keep_versions=50",
        "evaluation.heldout_episodes=0",
    )
    async with disturbed(ROOT / "examples/multi_turn.toml", tmp_path, "talk", overrides) as run:
        await ends(run, within_s=900)
    monkeypatch.setenv("OPENFORGE_RUNS", str(tmp_path))
    trajectories = await trajectories_of(run)
    summary = msgspec.json.decode(run.home.summary.read_bytes())
    assert summary["sequences_per_episode"] == 1.0
    assert summary["delivered_fraction"] == 1.0
    assert summary["turns"] == 5 * len(trajectories)
    assert {trajectory.extra_prefill_ratio for trajectory in trajectories} == {1.0}
    worst, _ = worst_difference(run.home.root / "weights", trajectories)
    assert worst < 1e-3

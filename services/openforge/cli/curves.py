"""Curves and table of several runs of one run file: `python -m openforge.cli.curves RUN ... --out docs/demo`.

Promises: every figure comes from the runs' own streams and summaries; nothing is typed by hand.
"""

import asyncio
import math
import platform
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any

import matplotlib
import msgspec
import typer

from openforge.bus import CAUGHT_UP
from openforge.cli.home import Home
from openforge.cli.reach import bus_of
from openforge.runs.progress import FOLDED, Progress

matplotlib.use("svg")

COLUMNS = (
    "seed",
    "success_heldout_before",
    "success_heldout_after",
    "success_heldout_after_low",
    "heldout_episodes",
    "reward_first_fifth",
    "reward_last_fifth",
    "train_s",
    "wall_s",
    "lag_max",
    "delivered_fraction",
    "sequences_per_episode",
    "ledger_closes",
)


def main(
    runs: Annotated[list[str], typer.Argument(help="Names of runs under OPENFORGE_RUNS.")],
    out: Annotated[Path, typer.Option(help="Folder for curves.svg and results.json.")] = Path("docs/demo"),
) -> None:
    """Draw the reward of each run over its steps, and print the table of their summaries."""
    out.mkdir(parents=True, exist_ok=True)
    summaries = [msgspec.json.decode(Home(run).summary.read_bytes()) for run in runs]
    rewards = [asyncio.run(_rewards(run)) for run in runs]
    _draw(rewards, [summary["seed"] for summary in summaries], out / "curves.svg")
    result = {
        "machine": machine(),
        "runs": [summary | {"rewards": reward} for summary, reward in zip(summaries, rewards, strict=True)],
    }
    (out / "results.json").write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    typer.echo("\n".join(table(summaries)))


async def _rewards(run: str) -> list[float]:
    """The mean reward of each committed batch, in the order of versions."""
    progress = Progress()
    async with bus_of(run) as bus:
        async for told in bus.follow(FOLDED, run=run, until_now=True):
            if told is not CAUGHT_UP:
                progress.apply(told.fact, told.at)
    return [step.reward_mean for step in sorted(progress.steps, key=lambda step: step.version)]


def table(summaries: list[dict[str, Any]]) -> list[str]:
    """Markdown: a row for each run, then mean and standard deviation over runs where that means something."""
    rows = [[_shown(summary[name]) for name in COLUMNS] for summary in summaries]
    if len(summaries) > 1:
        rows.append(["mean ± sd", *(_spread([summary[name] for summary in summaries]) for name in COLUMNS[1:])])
    head = [name.replace("_", " ") for name in COLUMNS]
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def _spread(values: list[Any]) -> str:
    if any(isinstance(value, bool) for value in values):
        return ""
    return f"{_shown(fmean(values))} ± {_shown(stdev(values))}"


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3f}"
    return str(value)


def _draw(rewards: list[list[float]], seeds: list[int], path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
    for reward, seed in zip(rewards, seeds, strict=True):
        axes.plot(range(1, len(reward) + 1), reward, marker=".", alpha=0.8, label=f"seed {seed}")
    longest = max(map(len, rewards))
    means = [fmean(reward[step] for reward in rewards if step < len(reward)) for step in range(longest)]
    axes.plot(range(1, longest + 1), means, color="black", linewidth=2, label="mean")
    axes.set(xlabel="step", ylabel="mean reward of the batch", ylim=(0, 1), xlim=(1, max(2, math.ceil(longest))))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, metadata={"Date": None})


def machine() -> str:
    """What the figures were taken on."""
    return f"{platform.machine()}, {_processor()}"


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    flags = next((line for line in lines if line.startswith("flags")), "").split()
    wide = next((flag for flag in ("avx512_bf16", "avx512f", "avx2") if flag in flags), "no avx2")
    return f"{len(names)} x {names[0] if names else 'unknown'} ({wide})"


if __name__ == "__main__":
    typer.run(main)

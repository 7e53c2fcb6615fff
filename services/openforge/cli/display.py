"""What a person sees of a run at work: a live panel on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from openforge.cli.follow import Watch
from openforge.runs import RunConfig
from openforge.runs.progress import Progress

_STEPS_SHOWN = 10
_PLAIN_EVERY_S = 15.0


class Display:
    """`show` may be called as often as you like."""

    def __init__(self, config: RunConfig, console: Console, live: Live | None) -> None:
        self._config = config
        self._console = console
        self._live = live
        self._steps_told = 0
        self._told_at = 0.0
        self._states: dict[str, tuple[str, int]] = {}
        self._remark = ""

    def show(self, watch: Watch) -> None:
        if self._live is not None:
            self._live.update(panel(self._config, watch))
            return
        for line in self._news(watch):
            print(line, flush=True)

    def _news(self, watch: Watch) -> Iterator[str]:
        """Lines for what changed since the last call, and one for how it stands now and then."""
        for process in watch.processes:
            now = (process.state, process.starts)
            if self._states.get(process.spec.name) != now and process.starts > 1:
                yield f"{process.spec.name}: {process.state}, start {process.starts}"
            self._states[process.spec.name] = now
        if watch.remark != self._remark:
            self._remark = watch.remark
            yield watch.remark or "it goes on"
        steps = sorted(watch.progress.steps, key=lambda step: step.version)
        for step in steps[self._steps_told :]:
            yield (
                f"step {step.version}/{self._config.run.steps}  reward {step.reward_mean:.3f}  lag {step.lag}  "
                f"{step.loss_tokens} tokens trained in {step.step_s:.1f} s"
            )
        news = len(steps) > self._steps_told
        self._steps_told = len(steps)
        if news or time.monotonic() - self._told_at > _PLAIN_EVERY_S:
            self._told_at = time.monotonic()
            yield "  " + standing(watch.progress)


@contextmanager
def display(config: RunConfig, *, plain: bool) -> Iterator[Display]:
    console = Console()
    if plain or not sys.stdout.isatty():
        yield Display(config, console, None)
        return
    with Live(console=console, refresh_per_second=4) as live:
        yield Display(config, console, live)


def standing(progress: Progress) -> str:
    """How the run stands, in one line."""
    rate = progress.tokens_per_s(time.time())
    return (
        f"version {progress.trained} (served {_or_dash(progress.served)})  {progress.in_flight} episodes in flight  "
        f"{progress.episodes_verified} verified  {rate:.0f} tokens/s  lost: {lost(progress)}"
        + "".join(
            f"  held out at v{version}: {evaluation.success:.3f} ({len(evaluation.rewards)})"
            for version, evaluation in sorted(progress.evaluations.items())
        )
    )


def lost(progress: Progress) -> str:
    """What was lost and why; attempts are tried again, retired trajectories replaced."""
    reasons = [
        f"{count} {reason}"
        for counts in (progress.failed_attempts, progress.retired)
        for reason, count in counts.items()
    ]
    return ", ".join(reasons) or "nothing"


def panel(config: RunConfig, watch: Watch) -> Group:
    progress = watch.progress
    head = Text.assemble((f"{config.run.name} ", "bold"), f"step {progress.trained}/{config.run.steps}")
    services = Table.grid(padding=(0, 2))
    services.add_row(*(_service(process.spec.name, process.state, process.starts) for process in watch.processes))
    steps = Table(box=None, pad_edge=False)
    for name in ("step", "reward", "lag", "tokens", "seconds"):
        steps.add_column(name, justify="right")
    for step in sorted(progress.steps, key=lambda step: step.version)[-_STEPS_SHOWN:]:
        steps.add_row(
            str(step.version), f"{step.reward_mean:.3f}", str(step.lag), str(step.loss_tokens), f"{step.step_s:.1f}"
        )
    return Group(
        head,
        services,
        Text(standing(progress)),
        *([Text(watch.remark, "yellow")] if watch.remark else []),
        steps,
        Text(watch.parting, "dim"),
    )


def _service(name: str, state: str, starts: int) -> Text:
    style = {"ready": "green", "running": "yellow", "waiting": "red"}.get(state, "dim")
    return Text(f"● {name}" + (f" ({starts})" if starts > 1 else ""), style)


def _or_dash(version: int | None) -> str:
    return "-" if version is None else str(version)

"""From what a person writes (`tensorboard:DIR`) to a sink."""

from collections.abc import Callable
from pathlib import Path

from openforge.cli.sinks.contract import Sink


class BadTarget(ValueError):
    """The target names no sink, or one whose library is missing."""


def _tensorboard(place: str, _: str) -> Sink:
    from openforge.cli.sinks.tensorboard import TensorBoard

    return TensorBoard(Path(place))


def _parquet(place: str, _: str) -> Sink:
    from openforge.cli.sinks.parquet import Parquet

    return Parquet(Path(place))


def _wandb(place: str, run: str) -> Sink:
    from openforge.cli.sinks.tracker import wandb_run

    return wandb_run(place, run)


def _trackio(place: str, run: str) -> Sink:
    from openforge.cli.sinks.tracker import trackio_run

    return trackio_run(place, run)


_SINKS: dict[str, tuple[Callable[[str, str], Sink], str]] = {
    "tensorboard": (_tensorboard, "tensorboard"),
    "parquet": (_parquet, "export"),
    "wandb": (_wandb, "wandb"),
    "trackio": (_trackio, "trackio"),
}
"""How each is opened, and the extra that has its library."""


def open_sink(target: str, run: str) -> Sink:
    """`tensorboard:DIR`, `parquet:DIR`, `wandb:PROJECT` or `trackio:PROJECT`. Raises `BadTarget`."""
    kind, _, place = target.partition(":")
    if kind not in _SINKS or not place:
        raise BadTarget(f"--to {target}: use one of tensorboard:DIR, parquet:DIR, wandb:PROJECT, trackio:PROJECT")
    opened, extra = _SINKS[kind]
    try:
        return opened(place, run)
    except ImportError as error:
        raise BadTarget(f"--to {target} needs {error.name}: pip install 'openforge[{extra}]'") from error

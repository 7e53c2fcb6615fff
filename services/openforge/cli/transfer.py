"""How a trained policy does where it was not trained: other temperatures, other kinds of tasks.

`python -m openforge.cli.transfer RUN`: evaluates the model that RUN began with and the one it ended with, each by a run
of its own without training steps, and prints a table. The episodes are held out and the same for both models.
"""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from openforge.cli import children
from openforge.cli.home import Home
from openforge.weights.adapters import whole_folder

UNTRAINED = "append,count_lines,grep,head,nested_directory,replace_word,tail,unique_lines,upper_case,write_two_words"
CASES = {
    "trained kinds, T = 0.7": (),
    "trained kinds, T = 0.01 (nearly greedy)": ("sampling.temperature=0.01",),
    "trained kinds, T = 1.0": ("sampling.temperature=1.0",),
    "kinds that were not trained, T = 0.7": ("environment.tasks={untrained}",),
}


def main(
    run: Annotated[str, typer.Argument(help="A finished run under OPENFORGE_RUNS.")],
    run_file: Annotated[Path, typer.Option(help="Its run file.")] = Path("examples/demo.toml"),
    episodes: Annotated[int, typer.Option(min=1, help="Held-out episodes for each figure.")] = 160,
    untrained: Annotated[str, typer.Option(help="Kinds of tasks that were not trained.")] = UNTRAINED,
    out: Annotated[Path | None, typer.Option(help="Write the figures here as JSON.")] = None,
) -> None:
    """Print success before and after training, for each case."""
    kinds = msgspec.json.encode(untrained.split(",")).decode()
    rows = {}
    for number, (case, overrides) in enumerate(CASES.items()):
        filled = tuple(override.replace("{untrained}", kinds) for override in overrides)
        rows[case] = [
            _evaluated(run_file, f"{run}-transfer-{number}-{when}", model, episodes, filled)
            for when, model in (("before", None), ("after", _newest_weights(run)))
        ]
    typer.echo(f"| {episodes} held-out episodes each | before | after |\n|---|---|---|")
    for case, (before, after) in rows.items():
        typer.echo(f"| {case} | {before:.3f} | {after:.3f} |")
    if out is not None:
        out.write_bytes(
            msgspec.json.format(msgspec.json.encode({"episodes": episodes, "success": rows}), indent=1) + b"\n"
        )


def _evaluated(run_file: Path, name: str, model: Path | None, episodes: int, overrides: tuple[str, ...]) -> float:
    """Held-out success of one model, by a run that only evaluates."""
    settings = (f"run.name={name}", "run.steps=0", f"evaluation.heldout_episodes={episodes}", *overrides)
    settings += (f"model.path={model}",) if model else ()
    children.train(run_file, settings)
    return float(msgspec.json.decode(Home(name).summary.read_bytes())["success_heldout_before"])


def _newest_weights(run: str) -> Path:
    home = Home(run).root
    return whole_folder(max((home / "weights").glob("v*-*")), home / "merged")


if __name__ == "__main__":
    typer.run(main)

"""What is left of a run in its folder: `summary.json` and `report.html`, both folded from the streams."""

from collections.abc import Callable

import msgspec
from tokenizers import Tokenizer

from openforge.bus import CAUGHT_UP, Bus
from openforge.cli.home import Home
from openforge.cli.report import Story, story_of, write_report
from openforge.runs import RunConfig
from openforge.runs.ledger import Ledger, ledger_of
from openforge.runs.model import model_folder
from openforge.runs.progress import FOLDED, Progress
from openforge.runs.summary import Summary, summary


async def numbers_now(bus: Bus, config: RunConfig) -> tuple[Summary, Ledger]:
    """From everything that the streams hold now."""
    progress = Progress()
    async for told in bus.follow(FOLDED, run=config.run.name, until_now=True):
        if told is not CAUGHT_UP:
            progress.apply(told.fact, told.at)
    ledger = await ledger_of(bus, config.run.name)
    return summary(progress, ledger, config), ledger


async def write_summary_and_report(bus: Bus, config: RunConfig, home: Home) -> Summary:
    """Both files, from everything that the streams hold now."""
    numbers, ledger = await numbers_now(bus, config)
    story = await story_of(bus, config.run.name)
    try:
        _write(numbers, ledger, story, config, home)
    except OSError as error:  # a disk that fills up while a file is written does not say which file
        error.filename = error.filename or str(home.root)
        raise
    return numbers


def _write(numbers: Summary, ledger: Ledger, story: Story, config: RunConfig, home: Home) -> None:
    text = msgspec.json.format(msgspec.json.encode(numbers), indent=2)
    scratch = home.summary.with_suffix(".tmp")
    scratch.write_bytes(text + b"\n")
    scratch.replace(home.summary)
    write_report(story, ledger, msgspec.to_builtins(numbers), decoder(config.model.path), home.report)


def decoder(model: str) -> Callable[[int], str]:
    """The text of one token id, by the model's own tokenizer; nothing where there is no model of ours."""
    if not model:
        return lambda token: ""
    tokenizer = Tokenizer.from_file(str(model_folder(model) / "tokenizer.json"))
    return lambda token: str(tokenizer.decode([token], skip_special_tokens=False))

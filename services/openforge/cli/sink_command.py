"""`openforge sink`: a run's curves, written where people look at curves."""

import asyncio
from typing import Annotated

import typer

from openforge.bus import Bus
from openforge.cli.reach import BAD_USE, fail, run_on_bus
from openforge.cli.sinks import BadTarget, Feed, open_sink
from openforge.client import Client

_SETTLE_S = 10.0


def sink(
    run: Annotated[str, typer.Argument(help="The run's name.", show_default=False)],
    to: Annotated[
        list[str],
        typer.Option("--to", help="tensorboard:DIR, parquet:DIR, wandb:PROJECT or trackio:PROJECT. May be repeated."),
    ],
    once: Annotated[bool, typer.Option("--once", help="End when everything that was told is written.")] = False,
    name: Annotated[
        str, typer.Option("--name", help="Go on after the last batch that a sink of this name has written.")
    ] = "",
) -> None:
    """Write each batch as a point at its version, and held-out rewards, as they are told; Ctrl-C ends it.

    Reads as any consumer does and changes nothing. TensorBoard and parquet are written anew from the run's first
    fact at each start; --name is for sinks that only append (wandb, trackio).
    """
    try:
        sinks = [open_sink(target, run) for target in to]
    except BadTarget as error:
        fail(str(error), BAD_USE)
    feed = Feed(sinks)

    async def batches(client: Client) -> None:
        async for told in client.batches(run=run, until_now=once, name=name):
            feed.batch(told)

    async def verdicts(client: Client) -> None:
        async for told in client.trajectories(run=run, until_now=once):
            feed.verdict(told)

    async def settle() -> None:
        while True:
            await asyncio.sleep(_SETTLE_S)
            feed.settle()

    async def write(bus: Bus) -> None:
        settling = asyncio.create_task(settle())
        async with Client.connect(settings=bus.settings, name="sink") as client, asyncio.TaskGroup() as group:
            group.create_task(batches(client))
            group.create_task(verdicts(client))
        settling.cancel()
        feed.settle()

    try:
        run_on_bus(run, write)
    finally:
        for each in sinks:
            each.close()

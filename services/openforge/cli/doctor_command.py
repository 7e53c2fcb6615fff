"""`openforge doctor`: is this deployment well, and what is to be done."""

import asyncio
import os
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from openforge.bus import BadSettings, BusSettings
from openforge.cli.doctor import Deployment, Finding, examine
from openforge.cli.home import Home
from openforge.cli.reach import BAD_USE, NO_BUS, fail, served
from openforge.protos import BadKey, token

_SIGNS = {"ok": "ok     ", "note": "note   ", "fault": "FAULT  ", "skipped": "skipped"}
_PATIENCE_S = 5.0


def doctor(
    run: Annotated[str, typer.Argument(help="A run whose config, versions and health are looked at too.")] = "",
    keys: Annotated[Path | None, typer.Option("--keys", help="The folder of `openforge bus credentials`.")] = None,
    engine: Annotated[str, typer.Option(help="The engine's address.", envvar="OPENFORGE_ENGINE_URL")] = "",
    proxy: Annotated[str, typer.Option(help="The proxy's address.", envvar="OPENFORGE_PROXY_URL")] = "",
    model: Annotated[str, typer.Option(help="A model that must be here; else the run's.")] = "",
    sandbox: Annotated[bool, typer.Option(help="Make a sandbox here and end it.")] = True,
    free_mb: Annotated[int, typer.Option(help="Less free disk than this is a fault.")] = 1024,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list and nothing else.")] = False,
) -> None:
    """Check a deployment end to end and say what to do about each fault; exits with 1 where there is one.

    Looks from where it runs, with the environment of the services: bus, streams, clock, blobs, dead letters, each
    role's credentials, engine and its version, proxy, model folder, a sandbox, health files and disks. A run on this
    machine is looked at where it is, also while it rests.
    """
    try:
        home = Home(token("run", run)) if run else None
        deployment = _deployment(home, keys, engine, proxy, model, sandbox, free_mb)
        findings = asyncio.run(_all(deployment, home))
    except (BadSettings, BadKey) as error:
        fail(str(error), BAD_USE)
    except NO_BUS as error:
        fail(str(error))
    typer.echo(msgspec.json.encode(findings).decode() if as_json else "\n".join(map(_line, findings)))
    raise typer.Exit(int(any(finding.state == "fault" for finding in findings)))


def _deployment(
    home: Home | None, keys: Path | None, engine: str, proxy: str, model: str, sandbox: bool, free_mb: int
) -> Deployment:
    bus = BusSettings.from_env()
    folders = [Path(text) for text in (os.environ.get("OPENFORGE_HOME", ""),) if text]
    health: Path | None = None
    if home is not None and (address := home.address()) is not None:
        bus = home.bus_settings(address.nats_url)
        keys = keys or home.keys
        engine, proxy = engine or address.engine_url, proxy or address.proxy_url
        health, folders = home.health, [home.root]
    bus = msgspec.structs.replace(bus, connect_timeout_s=min(bus.connect_timeout_s, _PATIENCE_S))
    return Deployment(
        bus=bus,
        run=home.run if home else "",
        keys=keys,
        engine_url=engine,
        proxy_url=proxy,
        model=model,
        health=health,
        folders=tuple(folders),
        free_mb=free_mb,
        sandbox=sandbox,
    )


async def _all(deployment: Deployment, home: Home | None) -> list[Finding]:
    if home is None or home.address() or os.environ.get("OPENFORGE_NATS_URL") or not home.nats.is_dir():
        return [finding async for finding in examine(deployment)]
    async with served(home) as url:
        bus, folders = home.bus_settings(url), (home.root,)
        resting = msgspec.structs.replace(deployment, bus=bus, keys=deployment.keys or home.keys, folders=folders)
        return [finding async for finding in examine(resting)]


def _line(finding: Finding) -> str:
    remedy = f"\n         -> {finding.remedy}" if finding.remedy else ""
    return f"{_SIGNS[finding.state]}  {finding.check}: {finding.said}{remedy}"

"""All checks, in the order in which one thing needs the other."""

from collections.abc import AsyncIterator
from contextlib import aclosing

from nats.js.errors import APIError

from openforge.bus import BadSettings, Bus, BusError, Denied, Undecodable
from openforge.cli.doctor import beside, on_bus
from openforge.cli.doctor.deployment import Deployment
from openforge.cli.doctor.finding import Finding, fault, ok, skipped
from openforge.runs import RunConfig

_ON_BUS = "streams, clock, blobs, dead letters, run"
_UNREADABLE = "look who wrote it (`openforge tail RUN --json`): another release, or a program that is none of ours"
_HIDDEN = "what else is on the bus, credentials"


async def examine(deployment: Deployment) -> AsyncIterator[Finding]:
    config: RunConfig | None = None
    published: int | None = None
    answering = True
    try:
        async with Bus.connect(deployment.bus, name="doctor") as bus:
            server = bus.link.client.connected_server_version
            yield ok("bus", f"nats-server {server.major}.{server.minor}.{server.patch} at {deployment.bus.url}")
            async with aclosing(on_bus.findings(deployment, bus)) as findings:
                async for finding in findings:
                    yield finding
            if deployment.run:
                try:
                    config, published = await on_bus.known_of(bus, deployment.run)
                    yield on_bus.run_finding(deployment.run, config)
                    if config is not None:
                        yield await on_bus.weights(bus, config)
                except Undecodable as error:
                    yield fault("run", f"a fact of it cannot be read: {error}", _UNREADABLE)
                except (APIError, Denied) as error:
                    yield skipped("run", f"its facts cannot be read: {error}")
    except (BusError, BadSettings, OSError) as error:
        yield fault("bus", str(error), on_bus.way_in(str(error), deployment))
        yield skipped(_ON_BUS, "the bus was not reached")
    except on_bus.NoAnswer as error:
        yield on_bus.no_answer(error)
        yield skipped(_HIDDEN, "JetStream gives no answer")
        answering = False
    if answering:
        async with aclosing(on_bus.credentials(deployment)) as findings:
            async for finding in findings:
                yield finding
    async for finding in beside.findings(deployment, config, published):
        yield finding

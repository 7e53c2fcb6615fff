"""Consumers in other languages as processes, what is told for them to read, and what they must say of it."""

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from credentials_world import World, world_at
from fact_examples import FACTS

from openforge.bus.permissions import CONSUMER, OPERATOR
from openforge.protos import Sequence as Tokens
from openforge.protos import TrajectoryVerified, pack_ids, unpack_ids, unpack_logprobs

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests/unit/protos/golden/TrajectoryVerified.1.hex"


class Consumer:
    """Says one line of JSON for each trajectory; `argv` is how it is started, before its options."""

    def __init__(self, argv: Sequence[str], world: World) -> None:
        self._argv = argv
        self._world = world
        self._process: asyncio.subprocess.Process

    async def start(self, *arguments: str) -> "Consumer":
        env = os.environ | {
            "OPENFORGE_NATS_URL": self._world.server.url,
            "OPENFORGE_NATS_NKEY_SEED_FILE": str(self._world.credentials.seed(CONSUMER, "mine")),
        }
        self._process = await asyncio.create_subprocess_exec(
            *self._argv, *arguments, env=env, stdout=asyncio.subprocess.PIPE, limit=1 << 24
        )
        return self

    async def lines(self, count: int) -> list[dict[str, Any]]:
        assert self._process.stdout is not None
        return [msgspec.json.decode(await self._process.stdout.readline()) for _ in range(count)]

    async def rest(self) -> list[dict[str, Any]]:
        """What it still says until it ends, in good order."""
        assert self._process.stdout is not None
        said = [msgspec.json.decode(line) async for line in self._process.stdout]
        assert await self._process.wait() == 0
        return said

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)


def examples() -> list[tuple[str, bytes]]:
    """The golden trajectory, one that is compressed, one that lies in the blobs, and many more."""
    golden = bytes.fromhex(GOLDEN.read_text())
    told = msgspec.msgpack.decode(golden, type=TrajectoryVerified)
    packed = msgspec.structs.replace(told, episode="packed", sequences=(_sequence(pack_ids([7] * 9000)),))
    large = msgspec.structs.replace(told, episode="large", sequences=(_sequence(_random_ids(80_000)),))
    many = [msgspec.structs.replace(told, episode=f"g{n:06d}-0", reward=n / 8) for n in range(1000)]
    return [(told.subject(), golden), *((fact.subject(), fact.encode()) for fact in (packed, large, *many))]


def _sequence(ids: bytes) -> Tokens:
    return msgspec.structs.replace(next(f for f in FACTS if isinstance(f, TrajectoryVerified)).sequences[0], ids=ids)


def _random_ids(count: int) -> bytes:
    return bytes(byte & 0x7F if at % 4 == 3 else byte for at, byte in enumerate(os.urandom(4 * count)))


def as_said(data: bytes) -> dict[str, Any]:
    fact: dict[str, Any] = msgspec.msgpack.decode(data)
    for sequence in fact["sequences"]:
        sequence["ids"] = unpack_ids(sequence["ids"])
        sequence["logprobs"] = unpack_logprobs(sequence["logprobs"])
    return fact


async def reads_every_trajectory_once_over_restarts(argv: Sequence[str], folder: Path) -> None:
    """Of server and consumer, with its values; the options are those of both examples."""
    told = examples()
    async with world_at(folder, consumers=["mine"], max_payload="256KB") as world:
        async with world.bus(OPERATOR) as bus:
            await bus.set_up()
            await bus.tell_again(told)
        consumer = await Consumer(argv, world).start("--name", "mine")
        said = await consumer.lines(50)
        await world.server.restart()
        said += await consumer.lines(50)
        consumer.terminate()
        said += await consumer.rest()
        assert len(said) < len(told)  # it was in mid-stream
        said += await (await Consumer(argv, world).start("--name", "mine", "--once")).rest()
        assert await (await Consumer(argv, world).start("--name", "mine", "--once")).rest() == []
        elsewhere = await Consumer(argv, world).start("--env", "other", "--once")
        assert await elsewhere.rest() == []
    assert [line["subject"] for line in said] == [subject for subject, _ in told]
    assert [line["fact"] for line in said] == [as_said(data) for _, data in told]
    assert said[0]["fact"]["sequences"][0]["ids"] == [5, 6, 7, 8, 9]
    assert said[0]["fact"]["sequences"][0]["logprobs"] == [-0.5, -0.25]

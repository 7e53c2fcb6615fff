"""The consumer in Node sees every trajectory once, and the numbers that were told."""

import asyncio
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
from credentials_world import World, world_at
from fact_examples import FACTS
from needed import needs

from openforge.bus.permissions import CONSUMER, OPERATOR
from openforge.protos import Sequence, TrajectoryVerified, pack_ids, unpack_ids, unpack_logprobs

ROOT = Path(__file__).resolve().parents[3]
GOLDEN = ROOT / "tests/unit/protos/golden/TrajectoryVerified.1.hex"

pytestmark = needs("node", "npm")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example with the packages that its lock file names."""
    folder = tmp_path_factory.mktemp("node") / "consumer"
    shutil.copytree(ROOT / "examples/consumers/node", folder, ignore=shutil.ignore_patterns("node_modules"))
    subprocess.run(
        ("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"), cwd=folder, check=True, timeout=600, stdout=2
    )
    return folder / "consumer.mjs"


class NodeConsumer:
    def __init__(self, program: Path, world: World) -> None:
        self._program = program
        self._world = world
        self._process: asyncio.subprocess.Process

    async def start(self, *arguments: str) -> "NodeConsumer":
        env = os.environ | {
            "OPENFORGE_NATS_URL": self._world.server.url,
            "OPENFORGE_NATS_NKEY_SEED_FILE": str(self._world.credentials.seed(CONSUMER, "mine")),
        }
        self._process = await asyncio.create_subprocess_exec(
            "node", str(self._program), *arguments, env=env, stdout=asyncio.subprocess.PIPE, limit=1 << 24
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


def _sequence(ids: bytes) -> Sequence:
    return msgspec.structs.replace(next(f for f in FACTS if isinstance(f, TrajectoryVerified)).sequences[0], ids=ids)


def _random_ids(count: int) -> bytes:
    return bytes(byte & 0x7F if at % 4 == 3 else byte for at, byte in enumerate(os.urandom(4 * count)))


def as_node_says(data: bytes) -> dict[str, Any]:
    fact: dict[str, Any] = msgspec.msgpack.decode(data)
    for sequence in fact["sequences"]:
        sequence["ids"] = unpack_ids(sequence["ids"])
        sequence["logprobs"] = unpack_logprobs(sequence["logprobs"])
    return fact


async def test_every_trajectory_once_with_its_values_over_restarts_of_server_and_consumer(
    program: Path, tmp_path: Path
) -> None:
    told = examples()
    async with world_at(tmp_path, consumers=["mine"], max_payload="256KB") as world:
        async with world.bus(OPERATOR) as bus:
            await bus.set_up()
            await bus.tell_again(told)
        consumer = await NodeConsumer(program, world).start("--name", "mine")
        said = await consumer.lines(50)
        await world.server.restart()
        said += await consumer.lines(50)
        consumer.terminate()
        said += await consumer.rest()
        assert len(said) < len(told)  # it was in mid-stream
        said += await (await NodeConsumer(program, world).start("--name", "mine", "--once")).rest()
        assert await (await NodeConsumer(program, world).start("--name", "mine", "--once")).rest() == []
        only_shell = await NodeConsumer(program, world).start("--env", "other", "--once")
        assert await only_shell.rest() == []
    assert [line["subject"] for line in said] == [subject for subject, _ in told]
    assert [line["fact"] for line in said] == [as_node_says(data) for _, data in told]
    assert said[0]["fact"]["sequences"][0]["ids"] == [5, 6, 7, 8, 9]
    assert said[0]["fact"]["sequences"][0]["logprobs"] == [-0.5, -0.25]

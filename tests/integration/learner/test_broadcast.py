"""Weights that a learner broadcasts: the real sender as a process, the receiving end of vLLM's workers, over gloo."""

import asyncio
import contextlib
import importlib.util
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from broadcasting import sender
from engine_fixtures import publish
from safetensors.torch import load_file

from openforge.learner.backends.contract import BackendRefused
from openforge.learner.broadcast import Bucket, Entry, buckets_of
from openforge.learner.offer import Offer
from openforge.models import tiny
from openforge.runs import RunConfig
from openforge.runs.config import EngineSection, EnvironmentSection, ModelSection, RunSection
from openforge.weights import Written

PLUGIN = Path("services/openforge/engine/vllm_plugin").absolute()


@pytest.fixture(scope="module")
def receiving() -> ModuleType:
    """The end that runs in vLLM's interpreter and is no part of our packages."""
    spec = importlib.util.spec_from_file_location("openforge_vllm_broadcast", PLUGIN / "openforge_vllm/broadcast.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class Workers:
    """All workers of one server, each in a thread of its own."""

    def __init__(self, receiving: ModuleType, address: str, link: str, count: int, engine: str = "") -> None:
        self._receiving, self._count = receiving, count
        self._stream = receiving.Stream(address, link, count + 1, "gloo", "", engine)
        self._receivers: dict[int, Any] = {}

    def receive(self, digest: str) -> list[dict[str, torch.Tensor]]:
        found: dict[int, Any] = {}

        def work(rank: int) -> None:
            try:
                if rank not in self._receivers:
                    self._receivers[rank] = self._receiving.Receiver(self._stream, rank, torch.device("cpu"))
                found[rank] = dict(self._receivers[rank].receive(digest))
            except self._receiving.Refused as refused:
                found[rank] = refused

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(1, self._count + 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert len(found) == self._count
        return [found[rank] for rank in sorted(found)]


def same(received: dict[str, torch.Tensor], written: Written) -> bool:
    stated = load_file(written.path / "model.safetensors")
    return list(received) == sorted(stated) and all(
        received[name].dtype == stated[name].dtype and torch.equal(received[name], stated[name]) for name in stated
    )


def test_every_worker_gets_every_tensor_of_the_version_that_it_asked_for_again_and_again(
    receiving: ModuleType, tmp_path: Path
) -> None:
    first = publish(tmp_path / "w", tiny(tmp_path / "m0", seed=0), 0)
    second = publish(tmp_path / "w", tiny(tmp_path / "m1", seed=1), 1)
    with sender(tmp_path / "w", bucket_bytes=40_000) as address:
        one, two = Workers(receiving, address, "one", 2), Workers(receiving, address, "two", 1)
        for written in (first, second, first):
            assert all(same(received, written) for received in one.receive(written.digest))
        assert all(same(received, second) for received in two.receive(second.digest))


async def test_a_server_that_is_started_anew_leaves_nothing_of_its_link_and_other_links_live(
    receiving: ModuleType, tmp_path: Path
) -> None:
    written = publish(tmp_path / "w", tiny(tmp_path / "m0", seed=0), 0)
    with sender(tmp_path / "w", bucket_bytes=1 << 20) as address:
        other = Workers(receiving, address, "other", 1, "e2")
        assert same(*await asyncio.to_thread(other.receive, written.digest), written)
        threads: list[int] = []
        servers: list[Workers] = []  # those before stay connected: it is the sender that lets go
        tasks = Path(f"/proc/{await sender_of(address)}/task")
        for link in ("one", "two", "three"):
            servers.append(Workers(receiving, address, link, 1, "e1"))
            assert same(*await asyncio.to_thread(servers[-1].receive, written.digest), written)
            await asyncio.sleep(1.0)
            threads.append(len(list(tasks.iterdir())))
        assert threads[0] == threads[1] == threads[2]
        assert same(*await asyncio.to_thread(other.receive, written.digest), written)
        store = receiving.store_at(address)
        assert not any(store.check([key]) for key in ("link/1", "link/2", "ask/one/1", "ask/three/1", "ask/other/2"))


def test_a_version_that_is_not_there_is_refused_and_the_next_one_comes(receiving: ModuleType, tmp_path: Path) -> None:
    written = publish(tmp_path / "w", tiny(tmp_path / "m0", seed=0), 0)
    with sender(tmp_path / "w", bucket_bytes=1 << 20) as address:
        workers = Workers(receiving, address, "one", 1)
        (refused,) = workers.receive("ab" * 32)
        assert isinstance(refused, receiving.Refused)
        assert "abababababab" in str(refused)
        (received,) = workers.receive(written.digest)
        assert same(received, written)


def test_bytes_that_are_not_those_of_the_manifest_are_refused_and_the_link_lives(
    receiving: ModuleType, tmp_path: Path
) -> None:
    bad, torn, good = (publish(tmp_path / "w", tiny(tmp_path / f"m{seed}", seed=seed), seed) for seed in range(3))
    flip_last_byte(bad.path / "model.safetensors")
    (torn.path / "model.safetensors").write_bytes(b"torn")
    with sender(tmp_path / "w", bucket_bytes=1 << 20) as address:
        workers = Workers(receiving, address, "one", 1)
        for written, why in ((bad, "blake3"), (torn, str(torn.path)), (bad, "blake3")):
            (refused,) = workers.receive(written.digest)
            assert isinstance(refused, receiving.Refused)
            assert why in str(refused)
        (received,) = workers.receive(good.digest)
        assert same(received, good)


def flip_last_byte(path: Path) -> None:
    data = path.read_bytes()
    path.unlink()  # it may be a second name of the model's own
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def test_tensors_are_packed_in_their_order_aligned_and_none_is_cut() -> None:
    tensors = [
        ("a", "bfloat16", (3,), 6),
        ("b", "float32", (4,), 16),
        ("c", "float32", (40,), 160),
        ("d", "uint8", (1,), 1),
    ]
    assert buckets_of(tensors, 64) == [
        Bucket(32, (Entry("a", "bfloat16", (3,), 0), Entry("b", "float32", (4,), 16))),
        Bucket(160, (Entry("c", "float32", (40,), 0),)),
        Bucket(16, (Entry("d", "uint8", (1,), 0),)),
    ]
    assert buckets_of([], 64) == []


async def test_the_sender_is_started_again_at_the_same_address_where_it_dies(
    receiving: ModuleType, tmp_path: Path
) -> None:
    written = publish(tmp_path / "w", tiny(tmp_path / "m0", seed=0), 0)
    offer = Offer(config(EngineSection(kind="vllm", weight_path="gloo")), tmp_path / "w", "127.0.0.1:0")
    keeping = asyncio.create_task(offer.keep())
    try:
        for link in ("one", "two"):
            workers = Workers(receiving, offer.address, link, 1)
            (received,) = await asyncio.to_thread(workers.receive, written.digest)
            assert same(received, written)
            os.kill(await sender_of(offer.address), signal.SIGKILL)
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


def test_without_a_gpu_nccl_is_refused_and_with_folders_nothing_is_offered(tmp_path: Path) -> None:
    with pytest.raises(BackendRefused, match=r'engine\.weight_path = "nccl": torch sees no CUDA device'):
        Offer(config(EngineSection(kind="vllm", weight_path="nccl")), tmp_path, "127.0.0.1:0")
    assert Offer(config(EngineSection()), tmp_path, "127.0.0.1:0").address == ""


def test_an_address_at_which_no_engine_could_meet_the_learner_is_refused(tmp_path: Path) -> None:
    gloo = config(EngineSection(kind="vllm", weight_path="gloo"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        used = taken.getsockname()[1]
        for listen in ("", ":0", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:70000", "0.0.0.0:0", "0:0", "*:0", ":::0"):
            with pytest.raises(BackendRefused, match="with a free port") as refused:
                Offer(gloo, tmp_path, listen)
            assert f"OPENFORGE_BROADCAST_LISTEN = {listen!r}: use HOST:PORT" in str(refused.value)
        with pytest.raises(BackendRefused, match=f"'127.0.0.1:{used}'"):
            Offer(gloo, tmp_path, f"127.0.0.1:{used}")
    assert Offer(gloo, tmp_path, f"127.0.0.1:{used}").address == f"127.0.0.1:{used}"


def config(engine: EngineSection) -> RunConfig:
    return RunConfig(
        run=RunSection(name="r", steps=1),
        model=ModelSection(path="/m"),
        engine=engine,
        environment=EnvironmentSection(name="letters", harness="letters"),
    )


async def sender_of(address: str) -> int:
    """The process that listens there."""
    async with asyncio.timeout(60):
        while True:
            for entry in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    if {"openforge.learner.broadcast", address} <= set(entry.read_bytes().decode().split("\0")):
                        return int(entry.parent.name)
            await asyncio.sleep(0.1)

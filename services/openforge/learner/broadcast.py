"""Weights as a broadcast: `python -m openforge.learner.broadcast --root WEIGHTS --listen HOST:PORT --transport nccl`.

Promises: what is sent is a published folder, hashed and found to be what its digest stands for, or a refusal; a server
that vanishes in the middle costs its own link and nothing else. It reads folders and knows nothing of training, so it
is a process of its own: where NCCL ends it, the learner is not touched and starts another.

The receiving end, and what the two say to each other, is `openforge_vllm.broadcast`, which runs in vLLM's interpreter.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from openforge.service import die_with_parent, log, set_up_logs
from openforge.weights import MANIFEST, WEIGHTS, BadWeights, check
from openforge.weights.manifest import digest_of, manifest_bytes

BUCKET_BYTES = 256 << 20
TIMEOUT = timedelta(seconds=120)
_ALIGN = 16
_LOOK_EVERY_S = 0.02


class Entry(msgspec.Struct, frozen=True):
    """One tensor in a bucket, from byte `at` on."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    at: int


class Bucket(msgspec.Struct, frozen=True):
    bytes: int
    tensors: tuple[Entry, ...]


def buckets_of(tensors: Iterable[tuple[str, str, tuple[int, ...], int]], most: int) -> list[Bucket]:
    """Tensors (name, dtype, shape, size in bytes) in their order, as many in one bucket as `most` bytes hold."""
    buckets: list[Bucket] = []
    entries: list[Entry] = []
    at = 0
    for name, dtype, shape, size in tensors:
        if entries and at + size > most:
            buckets.append(Bucket(at, tuple(entries)))
            entries, at = [], 0
        entries.append(Entry(name, dtype, shape, at))
        at += -(-size // _ALIGN) * _ALIGN
    return [*buckets, Bucket(at, tuple(entries))] if entries else buckets


class Shelf:
    """The published folders, each hashed once, however many links ask for it."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._checked: set[tuple[Path, str]] = set()
        self._one_at_a_time = threading.Lock()

    def checked(self, digest: str) -> Path:
        """The folder that this digest stands for; raises `BadWeights`."""
        folder = folder_of(self._root, digest)
        if folder is None:
            raise BadWeights(f"no folder of {self._root} has this manifest")
        with self._one_at_a_time:
            if (folder, digest) not in self._checked:
                check(folder, digest)
                self._checked.add((folder, digest))
        return folder


class Sender:
    """One link: a process group of this process and all workers of one server."""

    def __init__(self, shelf: Shelf, transport: str, address: str, link: str, world: int, bucket_bytes: int) -> None:
        self._shelf, self._link, self._bucket_bytes = shelf, link, bucket_bytes
        self._store = _store_at(address)
        self._device = torch.device("cuda" if transport == "nccl" else "cpu")
        self._group = _group(transport, dist.PrefixStore(link, self._store), world)

    def serve(self, ended: threading.Event) -> None:
        """Version after version, as they are asked for, until the group breaks or `ended` is set."""
        number = 1
        while asked := _taken(self._store, f"ask/{self._link}/{number}", ended):
            self._send(asked.decode())
            number += 1

    def _send(self, digest: str) -> None:
        began = time.monotonic()
        try:
            folder = self._shelf.checked(digest)
            opened = safe_open(folder / WEIGHTS, framework="pt", device="cpu")
            buckets = buckets_of(_stated(opened), self._bucket_bytes)
        except (BadWeights, OSError, SafetensorError) as error:
            self._header({"digest": digest, "refused": str(error)})
            log.warning("weights refused", link=self._link, digest=digest[:12], why=str(error))
            return
        with opened as weights:
            self._header({"digest": digest, "buckets": msgspec.to_builtins(buckets)})
            for bucket in buckets:
                self._broadcast(_packed(weights, bucket))
        sent = sum(bucket.bytes for bucket in buckets)
        log.info("weights sent", link=self._link, folder=folder.name, bytes=sent, send_s=time.monotonic() - began)

    def _header(self, header: dict[str, Any]) -> None:
        data = json.dumps(header).encode()
        self._broadcast(torch.tensor([len(data)], dtype=torch.int64))
        self._broadcast(torch.tensor(list(data), dtype=torch.uint8))

    def _broadcast(self, tensor: torch.Tensor) -> None:
        """Returns when the tensor may be forgotten."""
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._group.broadcast([tensor.to(self._device)], options).wait()
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()


def folder_of(root: Path, digest: str) -> Path | None:
    """The folder whose manifest this is, if it is still there."""
    for manifest in sorted(root.glob(f"v*/{MANIFEST}"), reverse=True):
        try:
            if digest_of(manifest_bytes(manifest.parent)) == digest:
                return manifest.parent
        except BadWeights:  # it was removed meanwhile
            continue
    return None


def _stated(weights: Any) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
    for name in weights.keys():  # noqa: SIM118 - no mapping, only named so
        tensor = weights.get_tensor(name)
        yield name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.nbytes


def _packed(weights: Any, bucket: Bucket) -> torch.Tensor:
    buffer = torch.zeros(bucket.bytes, dtype=torch.uint8)
    for entry in bucket.tensors:
        flat = weights.get_tensor(entry.name).contiguous().view(-1).view(torch.uint8)
        buffer[entry.at : entry.at + flat.numel()] = flat
    return buffer


def _group(transport: str, store: dist.Store, world: int) -> Any:
    if transport == "gloo":
        return dist.ProcessGroupGloo(store, 0, world, TIMEOUT)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = TIMEOUT
    return dist.ProcessGroupNCCL(store, 0, world, options)


def _store_at(address: str, *, master: bool = False) -> dist.TCPStore:
    host, _, port = address.rpartition(":")
    return dist.TCPStore(host, int(port), is_master=master, timeout=TIMEOUT, wait_for_workers=False)


def _taken(store: dist.Store, key: str, ended: threading.Event) -> bytes:
    """What was set there, once it was, and no longer is; empty where `ended` came before."""
    while not store.check([key]):
        if ended.wait(_LOOK_EVERY_S):
            return b""
    value = bytes(store.get(key))
    store.delete_key(key)
    return value


def _link(
    shelf: Shelf, transport: str, address: str, asked: dict[str, Any], bucket_bytes: int, ended: threading.Event
) -> None:
    """The process group goes with this frame."""
    log.info("linking", **asked)
    try:
        Sender(shelf, transport, address, asked["link"], asked["world"], bucket_bytes).serve(ended)
        log.info("link ended", link=asked["link"], why="its engine has another")
    except RuntimeError as error:  # the boundary to torch: the server at the other end is gone
        log.warning("link ended", link=asked["link"], why=str(error).splitlines()[0])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m openforge.learner.broadcast", description=__doc__)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--listen", required=True)
    parser.add_argument("--transport", choices=("gloo", "nccl"), required=True)
    parser.add_argument("--bucket-bytes", type=int, default=BUCKET_BYTES)
    options = parser.parse_args()
    set_up_logs("broadcast")
    die_with_parent()
    master = _store_at(options.listen, master=True)
    log.info("ready", address=options.listen, transport=options.transport)
    shelf = Shelf(options.root)
    never = threading.Event()
    links: dict[str, threading.Event] = {}
    number = 1
    while True:
        asked = json.loads(_taken(master, f"link/{number}", never))
        ended = threading.Event()
        if engine := asked["engine"]:  # a server that was started anew: the one before has no use for its link
            if engine in links:
                links[engine].set()
            links[engine] = ended
        arguments = (shelf, options.transport, options.listen, asked, options.bucket_bytes, ended)
        threading.Thread(target=_link, args=arguments, daemon=True).start()
        number += 1


if __name__ == "__main__":
    main()

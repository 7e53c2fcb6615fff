"""Weights, optimizer and random numbers in a folder, by torch's distributed checkpoint.

Promises: what is loaded is bit for bit what was saved; another number of ranks may load it; the policy's weights can be
read alone, by a single process that has neither the pool nor its optimizer. Of an engine with files of its own these
weights lie beside them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from openforge.learner.backends import ranks

POLICY = "model.model."
"""How the policy's parameters begin in a checkpoint: the entry `model`, and the transformers model in its network."""


WHOLE = "policy.safetensors"
"""The policy's parameters, whole, where what else there is can only be read by the engine that wrote it."""


class Stored(Protocol):
    """A network and its optimizer, sharded over the ranks or not."""

    @property
    def network(self) -> Any: ...

    @property
    def optimizer(self) -> Any: ...


class StorageFailed(RuntimeError):
    """What torch could not write or read; its own exception for that is none that `except Exception` sees."""


def save(folder: Path, stored: Mapping[str, Stored]) -> None:
    """`stored` by the prefix of its names in the checkpoint."""
    writer = dcp.FileSystemWriter(folder, sync_files=True)
    with _as_torch_says():
        dcp.save(_state(stored), storage_writer=writer, no_dist=_alone())


def load(folder: Path, stored: Mapping[str, Stored]) -> None:
    state = _state(stored)
    with _as_torch_says():
        dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=_alone())
    for prefix, one in stored.items():
        set_state_dict(
            one.network,
            one.optimizer,
            model_state_dict=state[f"{prefix}model"],
            optim_state_dict=state[f"{prefix}optimizer"],
        )
    torch.set_rng_state(state["random"])


def policy_parameters(folder: Path) -> dict[str, Tensor]:
    """The policy's parameters under their names in its model, whole, as they were saved by however many ranks."""
    if (folder / WHOLE).exists():
        return dict(load_file(folder / WHOLE))
    with _as_torch_says():
        reader = dcp.FileSystemReader(folder)
        wanted = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in reader.read_metadata().state_dict_metadata.items()
            if name.startswith(POLICY) and isinstance(entry, TensorStorageMetadata)
        }
        dcp.load(wanted, storage_reader=reader, no_dist=True)
    return {name.removeprefix(POLICY): tensor for name, tensor in wanted.items()}


def save_whole(folder: Path, parameters: Mapping[str, Tensor]) -> None:
    """What `policy_parameters` finds. Not synced."""
    whole = {name: tensor.contiguous() for name, tensor in parameters.items()}
    save_file(whole, folder / WHOLE, metadata={"format": "pt"})


def _state(stored: Mapping[str, Stored]) -> dict[str, Any]:
    state: dict[str, Any] = {"random": torch.get_rng_state()}
    for prefix, one in stored.items():
        model, optimizer = get_state_dict(one.network, one.optimizer)
        state |= {f"{prefix}model": model, f"{prefix}optimizer": optimizer}
    return state


def _alone() -> bool:
    return ranks.world() == 1


@contextmanager
def _as_torch_says() -> Iterator[None]:
    """Raises `StorageFailed`. That a single process is meant is no reason to warn."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as failed:
            raise StorageFailed("; ".join(str(cause) for cause, _ in failed.failures.values())) from failed

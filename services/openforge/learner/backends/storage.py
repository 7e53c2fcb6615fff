"""Weights, optimizer and random numbers in a folder, by torch's distributed checkpoint.

Promises: what is loaded is bit for bit what was saved; another number of ranks may load it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from openforge.learner.backends import ranks


def save(folder: Path, policy: Any, optimizer: Any) -> None:
    writer = dcp.FileSystemWriter(folder, sync_files=True)
    with _single_process_is_meant():
        dcp.save(_state(policy, optimizer), storage_writer=writer, no_dist=_alone())


def load(folder: Path, policy: Any, optimizer: Any) -> None:
    state = _state(policy, optimizer)
    with _single_process_is_meant():
        dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=_alone())
    set_state_dict(policy, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    torch.set_rng_state(state["random"])


def _state(policy: Any, optimizer: Any) -> dict[str, Any]:
    model, optimizer_state = get_state_dict(policy, optimizer)
    return {"model": model, "optimizer": optimizer_state, "random": torch.get_rng_state()}


def _alone() -> bool:
    return ranks.world() == 1


@contextmanager
def _single_process_is_meant() -> Iterator[None]:
    """Torch warns of what `no_dist` says."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield

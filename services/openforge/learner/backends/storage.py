"""Weights, optimizer and random numbers in a folder, by torch's distributed checkpoint.

Promises: what is loaded is bit for bit what was saved; another number of ranks may load it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from openforge.learner.backends import ranks
from openforge.learner.backends.trained import Trained


def save(folder: Path, stored: Mapping[str, Trained]) -> None:
    """`stored` by the prefix of its names in the checkpoint."""
    writer = dcp.FileSystemWriter(folder, sync_files=True)
    with _single_process_is_meant():
        dcp.save(_state(stored), storage_writer=writer, no_dist=_alone())


def load(folder: Path, stored: Mapping[str, Trained]) -> None:
    state = _state(stored)
    with _single_process_is_meant():
        dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=_alone())
    for prefix, trained in stored.items():
        set_state_dict(
            trained.network,
            trained.optimizer,
            model_state_dict=state[f"{prefix}model"],
            optim_state_dict=state[f"{prefix}optimizer"],
        )
    torch.set_rng_state(state["random"])


def _state(stored: Mapping[str, Trained]) -> dict[str, Any]:
    state: dict[str, Any] = {"random": torch.get_rng_state()}
    for prefix, trained in stored.items():
        model, optimizer = get_state_dict(trained.network, trained.optimizer)
        state |= {f"{prefix}model": model, f"{prefix}optimizer": optimizer}
    return state


def _alone() -> bool:
    return ranks.world() == 1


@contextmanager
def _single_process_is_meant() -> Iterator[None]:
    """Torch warns of what `no_dist` says."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield

"""Weights on their way to the engines: on the learner's own disk, from where a store makes them seen.

Promises: a folder is complete before it is published; a version that was computed again is published
again only if its weights came out otherwise or are gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from openforge.learner.adapters import AdapterFolders
from openforge.learner.backends.contract import Backend
from openforge.learner.probe import probe
from openforge.protos import PolicyPublished
from openforge.runs import RunConfig
from openforge.runs.model import model_folder
from openforge.weights import (
    WEIGHTS,
    BadWeights,
    Written,
    check,
    folder_name,
    keep_newest,
    read_manifest,
    write_weights,
)

if TYPE_CHECKING:
    from torch import Tensor


class Publisher:
    """Writes under `root`; all methods are slow and belong into the backend's thread."""

    def __init__(self, backend: Backend, config: RunConfig, root: Path) -> None:
        self._backend = backend
        self._config = config
        self._root = root.absolute()
        self._model = model_folder(config.model.path)
        alone = config.learner.lora.rank and config.engine.lora == "adapters"
        self._adapters = AdapterFolders(backend, config, self._root) if alone else None

    def write(self, version: int, incarnation: int, parent: str) -> Written:
        if self._adapters is not None:
            return self._adapters.write(version, incarnation, parent)
        tensors, dtype = self._backend.export(), self._config.engine.dtype
        return write_weights(
            self._root,
            self._stored(tensors),
            config_dir=self._model,
            version=version,
            incarnation=incarnation,
            probe=probe(self._backend.plain_model(), tensors, dtype),
            dtype=dtype,
            parent=parent,
        )

    def holds(self, published: PolicyPublished) -> bool:
        """Whether the folder of what was published is whole and has the backend's weights, bit for bit."""
        import torch
        from safetensors.torch import load_file

        folder = self._root / folder_name(published.version, published.incarnation)
        try:
            check(folder, published.digest)
        except BadWeights:
            return False
        if self._adapters is not None:
            return self._adapters.holds(folder)
        if read_manifest(folder).base:
            return False
        dtype = getattr(torch, self._config.engine.dtype)
        own, written = self._stored(self._backend.export()), load_file(folder / WEIGHTS)
        return own.keys() >= written.keys() and all(
            torch.equal(own[name].to(dtype), tensor) for name, tensor in written.items()
        )

    def _stored(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        from openforge.learner.backends.loading import as_stored

        return as_stored(str(self._model), tensors)

    def forget_old(self, in_use: set[str]) -> list[Path]:
        """Keep the newest folders and those that an engine serves."""
        return keep_newest(self._root, self._config.engine.keep_versions, in_use)

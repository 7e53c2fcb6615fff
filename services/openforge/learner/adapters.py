"""Low-rank adapters on their way to the engines: the weights that they belong to once, then the adapters alone.

Promises: adapters and the weights that they name by digest are complete before anybody is told; what the probe states
is what an engine computes that puts these adapters, as written, on those weights, as written.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from openforge.learner.probe import probe
from openforge.runs import RunConfig
from openforge.runs.model import model_folder
from openforge.weights import (
    BASE,
    BadWeights,
    Manifest,
    Written,
    check,
    folder_name,
    read_manifest,
    write_folder,
    write_model,
)
from openforge.weights.adapters import Adapters, merged, read_adapters
from openforge.weights.manifest import digest_of, manifest_bytes

if TYPE_CHECKING:
    from torch import Tensor


class TrainsAdapters(Protocol):
    """What of a backend is needed."""

    def adapters(self) -> Mapping[str, Tensor]: ...

    def plain_model(self) -> Any: ...


class AdapterFolders:
    """Writes under `root`."""

    def __init__(self, backend: TrainsAdapters, config: RunConfig, root: Path) -> None:
        self._backend = backend
        self._lora, self._dtype = config.learner.lora, config.engine.dtype
        self._model = model_folder(config.model.path)
        self._root = root
        self._base_digest = ""

    def write(self, version: int, incarnation: int, parent: str) -> Written:
        from openforge.learner.backends import lora

        base, adapters = self._base(), self._cast()
        stated = Manifest(
            version=version,
            incarnation=incarnation,
            parent=parent,
            dtype=self._dtype,
            files={},
            tensors={},
            probe=probe(self._backend.plain_model(), self._merged(adapters), "float32"),
            base=base,
        )
        fill = partial(lora.write, adapters=adapters, lora=self._lora, model_path=str(self._model), dtype=self._dtype)
        return write_folder(self._root / folder_name(version, incarnation), stated, fill)

    def holds(self, folder: Path) -> bool:
        """Whether the adapters in the whole folder are the backend's, bit for bit, on weights that are there."""
        import torch

        if read_manifest(folder).base != self._base():
            return False
        own, written = self._cast(), read_adapters(folder).tensors
        return own.keys() == written.keys() and all(torch.equal(own[name], tensor) for name, tensor in written.items())

    def _cast(self) -> dict[str, Tensor]:
        import torch

        return {name: tensor.to(getattr(torch, self._dtype)) for name, tensor in self._backend.adapters().items()}

    def _merged(self, adapters: dict[str, Tensor]) -> dict[str, Tensor]:
        """Under the model's names, on the weights below as they are written."""
        import torch

        below = self._backend.plain_model().named_parameters()
        written = {name: parameter.detach().to(getattr(torch, self._dtype)) for name, parameter in below}
        return merged(written, Adapters(self._lora.alpha / self._lora.rank, adapters))

    def _base(self) -> str:
        """The digest of the weights that the adapters belong to, written unless they are there."""
        if not self._base_digest:
            self._base_digest = self._written_before() or self._written_now()
        return self._base_digest

    def _written_before(self) -> str:
        folder = self._root / BASE
        try:
            digest = digest_of(manifest_bytes(folder))
            check(folder, digest)
            return digest if read_manifest(folder).dtype == self._dtype else ""
        except BadWeights:
            return ""

    def _written_now(self) -> str:
        from openforge.learner.backends.loading import as_stored

        tensors = as_stored(str(self._model), dict(self._backend.plain_model().named_parameters()))
        stated = Manifest(version=0, incarnation=0, dtype=self._dtype, files={}, tensors={})
        fill = partial(write_model, tensors=tensors, config_dir=self._model, dtype=self._dtype)
        return write_folder(self._root / BASE, stated, fill).digest

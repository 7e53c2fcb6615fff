"""Which backend a run asks for."""

from __future__ import annotations

import msgspec

from openforge.learner.backends.contract import Backend
from openforge.runs import RunConfig
from openforge.runs.model import model_folder


def backend_for(config: RunConfig) -> Backend:
    """Takes seconds: loads the model. Raises `BackendRefused`."""
    model = msgspec.structs.replace(config.model, path=str(model_folder(config.model.path)))
    config = msgspec.structs.replace(config, model=model)
    if config.learner.backend == "verl":
        from openforge.learner.backends.verl import verl_backend

        return verl_backend()
    if config.learner.world_size > 1:
        from openforge.learner.backends.fleet import Fleet

        return Fleet(config)
    from openforge.learner.backends.torch_fsdp import TorchBackend

    return TorchBackend(config)

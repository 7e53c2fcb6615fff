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
        from openforge.learner.backends.verl import refuse

        refuse(config)
    if config.learner.backend == "verl" or config.learner.world_size > 1:
        from openforge.learner.backends.fleet import Fleet

        return Fleet(config)  # verl's engines want a process group even of one
    return backend_of_rank(config)


def backend_of_rank(config: RunConfig) -> Backend:
    """This rank's share of a fleet, or all there is."""
    if config.learner.backend == "verl":
        from openforge.learner.backends.verl import VerlBackend

        return VerlBackend(config)
    from openforge.learner.backends.torch_fsdp import TorchBackend

    return TorchBackend(config)

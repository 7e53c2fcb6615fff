"""The place of the verl backend (FSDP and Megatron engines); it is not in this release."""

from __future__ import annotations

from typing import NoReturn

from openforge.learner.backends.contract import BackendRefused


def verl_backend() -> NoReturn:
    raise BackendRefused(
        "learner.backend = 'verl' is not available in this release: use learner.backend = 'torch', which shards "
        "over learner.world_size processes."
    )

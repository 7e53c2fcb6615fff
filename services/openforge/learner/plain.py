"""The policy of a checkpoint as a folder that transformers loads, or its adapters as one that peft loads.

Promises: only weights are read, by one process, however many ranks wrote them; what is written is whole or not there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from openforge.learner.checkpoints import Checkpoint
from openforge.runs import RunConfig
from openforge.weights import Dtype, drafted, write_model

if TYPE_CHECKING:
    from torch import Tensor


class Unreadable(Exception):
    """The checkpoint cannot be read, or not as asked; the message says what to do."""


def policy_of(checkpoint: Checkpoint, config: RunConfig) -> dict[str, Tensor]:
    """The trained parameters under their names in the model, adapters beside what they adapt. Raises `Unreadable`."""
    from openforge.learner.backends.storage import policy_parameters

    try:
        return policy_parameters(checkpoint.state)
    except Exception as error:  # the boundary to torch: whatever it finds in broken files
        raise Unreadable(
            f"{checkpoint.folder} cannot be read ({error}): it was removed or damaged meanwhile, so choose another "
            f"of `openforge checkpoint list {config.run.name}`"
        ) from error


def write_plain(policy: Mapping[str, Tensor], config: RunConfig, out: Path, dtype: Dtype) -> None:
    """The whole model with its tokenizer, adapters merged in: a folder for `from_pretrained`."""
    from openforge.learner.backends import loading, lora

    tensors = lora.merged(policy, config.learner.lora) if config.learner.lora.rank else policy
    stored = loading.as_stored(config.model.path, tensors)
    with drafted(out) as draft:
        write_model(draft, stored, config_dir=config.model.path, dtype=dtype)


def write_adapter(policy: Mapping[str, Tensor], config: RunConfig, out: Path, dtype: Dtype) -> None:
    """The adapters alone, to be put on the model that the run began with."""
    from openforge.learner.backends import lora

    with drafted(out) as draft:
        lora.write(draft, lora.alone(policy), config.learner.lora, config.model.path, dtype)

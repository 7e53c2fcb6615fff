"""vLLM's weight transfer, from folders on disk or from a learner that broadcasts them.

Promises: between `start_weight_update` and `finish_weight_update` the model gets all tensors of one version, or a call
fails, and then the server has to be ended: its weights are half of each.

Written for vLLM 0.32; the interface is `vllm.distributed.weight_transfer.base.WeightTransferEngine`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from openforge_vllm.broadcast import Receiver, Stream
from openforge_vllm.one_adapter import multiply_at_once
from openforge_vllm.seeds import put_aside_in_unfinished_prompts


@dataclass
class NothingToInit(WeightTransferInitInfo):
    """Folders need no connection."""


@dataclass
class Folder(WeightTransferUpdateInfo):
    """`folder` holds safetensors files with checkpoint names, whole and checked. Where there is a `stream`, its tensors
    come from there."""

    folder: str
    stream: dict[str, Any] | None = None


class FolderTransfer(WeightTransferEngine[NothingToInit, Folder]):
    init_info_cls = NothingToInit
    update_info_cls = Folder

    _receiver: Receiver | None = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if current_platform.is_cpu():  # made once in each worker, when it has its model
            put_aside_in_unfinished_prompts()
            if (lora := self.vllm_config.lora_config) is not None and lora.max_loras == 1:
                multiply_at_once()

    def init_transfer_engine(self, init_info: NothingToInit) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if torch.cuda.is_available():  # a CPU has nothing to wait for, and vLLM's own call fails there
            torch.cuda.synchronize()

    def receive_weights(self, update_info: Folder) -> None:
        if update_info.stream is None:
            self.model.load_weights(_tensors(Path(update_info.folder)))
            return
        stream = Stream(**update_info.stream)
        if self._receiver is None or not self._receiver.serves(stream):
            self._receiver = Receiver(stream, self._rank(), self.device)
        self.model.load_weights(self._receiver.receive(stream.digest))

    def _rank(self) -> int:
        """Among all workers of the server, counted from 1."""
        parallel = self.parallel_config
        return 1 + parallel.data_parallel_index * parallel.world_size + parallel.rank

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        _pack_heads_anew(self.model)

    def shutdown(self) -> None:
        pass


def _pack_heads_anew(model: torch.nn.Module) -> None:
    """On a CPU the output head computes with a packed copy of its weights. Where they are tied to the embedding, no
    tensor of the checkpoint is the head's own, so vLLM leaves the copy as it was: old logits from new layers."""
    if not current_platform.is_cpu():
        return
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} has no safetensors file")
    for file in files:
        with safe_open(file, framework="pt", device="cpu") as opened:
            for name in opened.keys():  # noqa: SIM118 - no mapping, only named so
                yield name, opened.get_tensor(name)

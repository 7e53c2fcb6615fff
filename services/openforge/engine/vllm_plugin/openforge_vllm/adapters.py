"""vLLM's worker with one more call: low-rank adapters replaced in place, while requests that use them are frozen.

vLLM's own `load_inplace` cannot do it. It marks the adapter in every request that is asked from then on, and a worker
loads a marked adapter from its folder again before each step; requests from before the swap are marked too, with the
folder of the version before, and bring that back (0.32: `LRUCacheWorkerLoRAManager.add_adapter`).
"""

from pathlib import Path
from typing import Any

from vllm.lora.request import LoRARequest


class AdapterSwap:
    """Mixed into each worker by `--worker-extension-cls`. The server has one adapter, which it began with."""

    list_loras: Any
    add_lora: Any

    def swap_adapter(self, name: str, folder: str) -> None:
        """The adapter of `folder` in the place of the one that is there; that one stays if this cannot be loaded."""
        if not Path(folder).is_dir():  # vLLM would take the path for the name of a repository
            raise FileNotFoundError(folder)
        (number,) = self.list_loras()
        if not self.add_lora(LoRARequest(name, number, folder, load_inplace=True)):
            raise RuntimeError(f"{folder}: the adapter was not loaded")

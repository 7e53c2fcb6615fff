"""A CPU as a platform of verl 0.9.1, which knows accelerators alone: its FSDP engine then runs on gloo.

Promises: whoever asks for memory, streams or seeds of a device gets an answer that changes nothing. Imports verl.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry, set_platform

CPU = "cpu"


def use_cpu() -> None:
    """Before anything of `verl.workers` is imported. Done twice, it is done once."""
    if PlatformRegistry.get(CPU) is not None:
        return
    PlatformRegistry.register(platform=CPU)(CpuPlatform)
    set_platform(CpuPlatform())
    from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead

    EngineRegistry.register(model_type="language_model", backend=["fsdp2"], device=CPU)(FSDPEngineWithLMHead)


class CpuModule(ModuleType):
    """What `torch.cuda` is to a GPU."""

    @staticmethod
    def is_available() -> bool:
        return False

    @staticmethod
    def device_count() -> int:
        return 0

    @staticmethod
    def current_device() -> str:
        return CPU

    @staticmethod
    def get_device_name(*_: Any) -> str:
        return CPU

    @staticmethod
    def mem_get_info(*_: Any) -> tuple[int, int]:
        return 0, 0

    @staticmethod
    def memory_allocated(*_: Any) -> int:
        return 0

    memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated

    @staticmethod
    def empty_cache() -> None: ...

    @staticmethod
    def set_device(*_: Any) -> None: ...

    @staticmethod
    def synchronize(*_: Any) -> None: ...

    get_rng_state = staticmethod(torch.get_rng_state)
    set_rng_state = staticmethod(torch.set_rng_state)


class CpuPlatform(PlatformBase):  # type: ignore[misc]
    device_name = CPU
    vendor_name = CPU
    device_module = CpuModule("openforge_cpu")

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        """Its name: verl moves tensors to it, and a number would be a GPU's."""
        return CPU

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "OPENFORGE_NO_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None

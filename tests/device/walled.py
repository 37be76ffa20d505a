"""The test device, with what a framework asks the module of a device. ``device.cpp`` says what the device is.

Importing this makes it the accelerator of the process, so jobs import it and tests do not.
"""

from __future__ import annotations

import contextlib
import os
import types
from collections.abc import Iterator
from typing import Any

import torch

from device.compiled import NAME, library


def _index(device: Any = None) -> int:
    if device is None or (not isinstance(device, int) and torch.device(device).index is None):
        return int(torch.accelerator.current_device_index())
    return device if isinstance(device, int) else int(torch.device(device).index)


class _Runtime:
    """Registers memory of the host under the names that CUDA's runtime has for it."""

    @staticmethod
    def cudaHostRegister(address: int, size: int, _flags: int) -> int:  # noqa: N802
        torch.ops.walled.register(address, size)
        return 0

    @staticmethod
    def cudaHostUnregister(address: int) -> int:  # noqa: N802
        torch.ops.walled.unregister(address)
        return 0


def _module() -> types.ModuleType:
    generators = [torch.ops.walled.default_generator(index) for index in range(torch.ops.walled.device_count())]
    module: Any = types.ModuleType(f"torch.{NAME}")
    module.is_available = module.is_initialized = module.is_bf16_supported = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: len(generators)
    module.current_device = _index
    module.set_device = lambda device: torch.accelerator.set_device_index(_index(device))
    module.synchronize = lambda device=None: torch.accelerator.synchronize(device)
    module.current_stream = lambda device=None: torch.accelerator.current_stream(device)
    module.Stream, module.Event = torch.Stream, torch.Event
    module.empty_cache = lambda: None
    module.get_rng_state = lambda device=None: generators[_index(device)].get_state()
    module.set_rng_state = lambda state, device=None: generators[_index(device)].set_state(state)
    module.manual_seed = lambda seed: generators[_index()].manual_seed(seed)
    module.manual_seed_all = lambda seed: [each.manual_seed(seed) for each in generators]
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.cudart = _Runtime
    module.device = _device
    return module


@contextlib.contextmanager
def _device(device: Any) -> Iterator[None]:
    before = _index()
    torch.accelerator.set_device_index(_index(device))
    try:
        yield
    finally:
        torch.accelerator.set_device_index(before)


def lightning_accelerator(base: Any) -> Any:
    """Return the device as an accelerator of Lightning.

    Args:
        base: the class ``Accelerator``, of Lightning or of Fabric.
    """

    class Walled(base):
        def setup_device(self, device: torch.device) -> None:
            torch.accelerator.set_device_index(_index(device))

        def teardown(self) -> None: ...

        def get_device_stats(self, device: Any) -> dict[str, Any]:
            return {}

        parse_devices = staticmethod(lambda devices: devices)
        get_parallel_devices = staticmethod(lambda devices: [torch.device(NAME, index) for index in range(devices)])
        auto_device_count = staticmethod(lambda: 1)
        is_available = staticmethod(lambda: True)
        name = staticmethod(lambda: NAME)

    return Walled()


def lightning_ddp(base: Any, ranks: int) -> Any:
    """Return a strategy that trains on several of the devices, over the group that knows them alone.

    Args:
        base: the class ``DDPStrategy``, of Lightning or of Fabric.
    """

    class DDPStrategy(base):
        # Else it would make a stream of CUDA.
        def determine_ddp_device_ids(self) -> None: ...

        _determine_ddp_device_ids = determine_ddp_device_ids

    devices = [torch.device(NAME, index) for index in range(ranks)]
    return DDPStrategy(parallel_devices=devices, process_group_backend=f"cpu:gloo,{NAME}:{NAME}")


torch.ops.load_library(library())
torch.utils.rename_privateuse1_backend(NAME)
torch._register_device_module(NAME, _module())
torch.utils.generate_methods_for_privateuse1_backend()
torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count())

"""The test device as an accelerator of DeepSpeed. Importing this makes it that of the process."""

from __future__ import annotations

import os
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

from device.compiled import NAME


class Walled(CPU_Accelerator):  # type: ignore[misc]  # DeepSpeed has no types
    """What an engine asks of an accelerator that is not the host; operators are those of the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self._communication_backend_name = f"cpu:gloo,{NAME}:{NAME}"
        self._module: Any = torch.get_device_module(NAME)

    def is_synchronized_device(self) -> bool:
        return False

    def device_name(self, device_index: int | None = None) -> str:
        return NAME if device_index is None else f"{NAME}:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        return self._module.device(device_index)

    def set_device(self, device_index: int) -> None:
        self._module.set_device(device_index)

    def current_device(self) -> int:
        return int(self._module.current_device())

    def current_device_name(self) -> str:
        return f"{NAME}:{self.current_device()}"

    def device_count(self) -> int:
        return int(self._module.device_count())

    def synchronize(self, device_index: int | None = None) -> None:
        self._module.synchronize(device_index)

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        self._module.set_rng_state(new_state, device_index)

    def get_rng_state(self, device_index: int | None = None) -> Any:
        return self._module.get_rng_state(device_index)

    def manual_seed(self, seed: int) -> None:
        self._module.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        self._module.manual_seed_all(seed)

    def default_generator(self, device_index: int) -> Any:
        return torch.ops.walled.default_generator(device_index)

    @property
    def Stream(self) -> Any:  # noqa: N802
        return torch.Stream

    @property
    def Event(self) -> Any:  # noqa: N802
        return torch.Event

    def stream(self, stream: Any) -> Any:
        return stream

    def current_stream(self, device_index: int | None = None) -> Any:
        return torch.accelerator.current_stream(device_index)

    def default_stream(self, device_index: int | None = None) -> Any:
        return torch.accelerator.current_stream(device_index)

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == NAME


set_accelerator(Walled())
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
os.environ.setdefault("DS_ACCELERATOR", "cpu")

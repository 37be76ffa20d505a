"""Capture and restore the powers of beta in DeepSpeed's C++ optimizers, which DeepSpeed does not save.

``DeepSpeedCPUAdam``, and ``FusedAdam`` on the CPU, correct their bias with ``beta ** step``: a product in single
precision that each step multiplies by ``beta``. A resumed process would compute the power directly, and differ in the
last bit. The C++ object has no setter, but stepping it on a dummy of one element repeats the multiplications.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

Betas = tuple[tuple[float, float], ...]

_NEGLIGIBLE = 2.0**-30
"""``1 - power`` is 1 in single precision for a power below this, so the rounding of the power does not matter."""


class BetaPowers:
    """The powers of beta of one optimizer.

    Args:
        optimizer: the optimizer that ``deepspeed.initialize`` was given or made.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._step_dummy = _dummy_step(optimizer)
        self._used = self._next = self._betas()
        self._since = 0

    def _betas(self) -> Betas:
        if self._step_dummy is None:
            return ()
        pairs = [group["betas"] for group in self._optimizer.param_groups]  # lists, where they come from a JSON file
        return tuple((first, second) for first, second in pairs)

    def count(self) -> int:
        """Return the steps that the optimizer has taken."""
        return max((int(state.get("step", 0)) for state in self._optimizer.state.values()), default=0)

    def observe(self, applied: bool) -> None:
        """Keep track of the betas after a step: when they change, C++ computes the power directly again.

        Args:
            applied: the step was not skipped because of an overflow.
        """
        if self._step_dummy is None:
            return
        if applied:
            if self._next != self._used or len(set(self._next)) > 1:
                self._since = self.count()
            self._used = self._next
        self._next = self._betas()

    def state_dict(self) -> dict[str, Any]:
        """Return the step at which the products began, and their betas."""
        return {"since": self._since, "betas": [list(betas) for betas in self._used]}

    def replay(self, saved: dict[str, Any] | None) -> None:
        """Restore the products of the C++ object, for the number of steps that the optimizer counts.

        Args:
            saved: what :meth:`state_dict` returned; ``None`` if the betas never changed.
        """
        if saved is not None:
            self._since = saved["since"]
            self._used = tuple((first, second) for first, second in saved["betas"])
        self._next = self._betas()
        if self._step_dummy is None:
            return
        steps, betas = self.count(), self._used[-1]
        if steps == 0 or max(betas) ** steps < _NEGLIGIBLE:
            return
        self._step_dummy(0, (0.0, 0.0))  # other betas, so that the next step computes the first power directly
        for step in range(max(self._since, 1), steps + 1):
            self._step_dummy(step, betas)


def _dummy_step(optimizer: Any) -> Callable[[int, tuple[float, float]], None] | None:
    """Return a function that steps the C++ object on a dummy; ``None`` for an optimizer without powers."""
    tensors = [torch.zeros(1) for _ in range(4)]
    if isinstance(optimizer, DeepSpeedCPUAdam):

        def step_cpu_adam(step: int, betas: tuple[float, float]) -> None:
            # seam: deepspeed 0.19: ds_opt_adam, opt_id
            optimizer.ds_opt_adam.adam_update(optimizer.opt_id, step, 0.0, *betas, 1.0, 0.0, False, *tensors)

        return step_cpu_adam
    if isinstance(optimizer, FusedAdam) and get_accelerator().device_name() == "cpu":

        def step_fused_adam(step: int, betas: tuple[float, float]) -> None:
            # seam: deepspeed 0.19: multi_tensor_adam, which keeps one C++ object for each mode
            optimizer.multi_tensor_adam(
                1, torch.zeros(1, dtype=torch.int), [[each] for each in tensors], 0.0, *betas, 1.0, step,
                optimizer.adam_w_mode, False, 0.0,
            )  # fmt: skip

        return step_fused_adam
    return None

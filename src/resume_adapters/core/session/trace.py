"""What a watched run writes of each step: its batches, losses, learning rates, random state, weights and optimizers.

Optimizers are observed through torch's global hooks: no adapter says which there are. Everything is read where it is;
a digest draws no random number and is sent to no other rank.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from resume_adapters.core import devices
from resume_adapters.core.devices import RandomStates
from resume_adapters.core.run.run import ResumableRun
from resume_adapters.core.session.context import RestoreContext
from resume_adapters.core.session.framework import Framework
from resume_adapters.core.state import rng
from resume_adapters.core.state.fingerprint import value_digest
from resume_adapters.core.state.rng import GeneratorState
from resume_adapters.core.state.stateful import parameters_of
from resume_adapters.core.trace.log import TraceLog


class StepTrace:
    """The trace of one training call on one rank.

    Args:
        log: gets the lines.
        framework: has the model.
        generators: the generators that the user registered.
    """

    def __init__(self, log: TraceLog, framework: Framework, generators: Mapping[str, GeneratorState]) -> None:
        self._log = log
        self._framework = framework
        self._generators = generators
        self._hooks: list[Any] = []
        self._stepped: dict[int, tuple[Any, list[str | None]]] = {}  # an optimizer, and the rates of its groups
        self._batches: list[str] = []
        self._losses: list[str | None] = []
        self._grad_norm: str | None = None
        self._is_partial = False
        self._loaders = 0
        self._last = 0

    def begin(self, run: ResumableRun, context: RestoreContext | None) -> None:
        """Write where this launch begins, and observe the optimizers.

        Args:
            run: the run, opened.
            context: what is resumed from; ``None`` for a fresh start.
        """
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        manifest = context.checkpoint.manifest if context is not None else None
        self._last = context.step if context is not None else 0
        self._log.write(
            "start",
            pid=os.getpid(),
            world_size=run.ranks.world_size,
            generation=run.generation,
            step=self._last,
            run_directory=str(run.directory),
            framework=self._framework.about.label,
            every=self._log.every,
            keep=repr(run.pruner.keep),
            device=devices.kind_in_use(),
            repeats=devices.repeats(),
            missing=missing_parts(manifest.parts if manifest is not None else ()),
        )
        self._hooks.append(register_optimizer_step_pre_hook(self._before_step))

    def add_loader(self, dataset: Any) -> None:
        """Write of what kind the dataset of a training loader is."""
        place = f"loader {self._loaders}"
        self._loaders += 1
        self._log.write("data", place=place, dataset=type(dataset).__name__)

    def add_missing(self, entries: Sequence[Any]) -> None:
        """Write which parts the first save of this launch names as missing."""
        self._log.write("missing", parts=missing_parts(entries))

    # ---- A step

    def begin_partial_step(self) -> None:
        """Leave the batches and losses out of the next line: an earlier launch has done some of that step's."""
        self._is_partial = True

    def add_batch(self, batch: Any) -> None:
        """Add the batch of a micro-step, as the training step gets it."""
        self._batches.append(value_digest(batch))

    def add_loss(self, loss: Any) -> None:
        """Add the loss of a micro-step; ``None`` where the script gives none."""
        self._losses.append(_hex(loss))

    def set_grad_norm(self, norm: Any) -> None:
        """Set the gradient norm of the step."""
        self._grad_norm = _hex(norm)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        _, rates = self._stepped.setdefault(id(optimizer), (optimizer, []))
        # Several times in a step, with some of the groups each time, where ZeRO steps its partitions.
        rates += [_hex(group["lr"]) for group in optimizer.param_groups]

    def end_step(self, step: int, epoch: float) -> None:
        """Write the line of a step, and pause if that is asked for here; a no-op where the step has its line already.

        Args:
            epoch: epochs completed, with the fraction of the running one.
        """
        if step == self._last:  # a batch after which a hand-written optimization has not stepped
            return
        is_due = step // self._log.every != self._last // self._log.every
        optimizers = [optimizer for optimizer, _ in self._stepped.values()]
        self._log.write(
            "step",
            step=step,
            epoch=epoch,
            batches=None if self._is_partial else self._batches,
            rng=self._random_state(),
            loss=None if self._is_partial else self._losses,
            grad_norm=self._grad_norm,
            lr=[rates for _, rates in self._stepped.values()],
            weights=self._weights(optimizers) if is_due else None,
            optimizer=value_digest([_optimizer_state(each) for each in optimizers]) if is_due else None,
        )
        self._last, self._is_partial, self._grad_norm = step, False, None
        self._batches, self._losses, self._stepped = [], [], {}
        self._log.reach(step)

    def _random_state(self) -> dict[str, str]:
        state = rng.capture_with(self._generators)
        process = state["process"]
        found = RandomStates.from_tree(process["devices"])
        devices = {f"{found.kind}:{index}": each for index, each in enumerate(found.states)} if found else {}
        every = {**process["cpu"], **devices, **state["registered"]}
        return {name: value_digest(each) for name, each in every.items()}

    def _weights(self, optimizers: Sequence[Any]) -> str:
        """Return the digest of the model, and of what the optimizers step beside it, such as flat partitions."""
        model = {name: value for name, value in self._framework.state_dict().items() if _has_content(value)}
        known = {_address(each) for each in model.values()}
        beside = [each for each in parameters_of(*optimizers) if _has_content(each) and _address(each) not in known]
        return value_digest([model, beside])

    def close(self) -> None:
        """Observe the optimizers no longer."""
        while self._hooks:
            self._hooks.pop().remove()


def missing_parts(entries: Sequence[Any]) -> list[str]:
    """Return in words what a checkpoint does not hold."""
    return [f"{each.name}: {each.note}" for each in entries if each.by == "missing"]


def _hex(number: Any) -> str | None:
    """Return a number, or a tensor that holds one, as ``float.hex()``; ``None`` for anything else."""
    import torch

    if isinstance(number, torch.Tensor):
        local = number.to_local() if hasattr(number, "to_local") else number
        return float(local.detach()).hex() if local.numel() == 1 and not local.is_complex() else None
    return float(number).hex() if isinstance(number, int | float) else None


def _optimizer_state(optimizer: Any) -> list[Any]:
    """Return the state of an optimizer in the order of its parameters: their own order in it is that of their use."""
    return [optimizer.state[each] for each in parameters_of(optimizer) if each in optimizer.state]


def _has_content(value: Any) -> bool:
    return not getattr(value, "is_meta", False)


def _address(tensor: Any) -> tuple[int, int]:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return (local.data_ptr(), local.numel()) if hasattr(local, "data_ptr") else (id(local), 0)

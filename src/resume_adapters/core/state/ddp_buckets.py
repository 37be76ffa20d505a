"""The order in which DDP reduces gradients, so that a resumed run sums them in the order of the uninterrupted one.

DDP rebuilds its buckets after the first backward of a process, in the order in which gradients became ready. When a
checkpoint is saved, that is long past. A resumed process would reduce its first step with the initial buckets: it would
add in a different order, and with three or more ranks the sums differ in the last bit. So the order is captured once,
and a resumed process replays it in a backward of zeros before its first real step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from resume_adapters.core.state import keys
from resume_adapters.errors import StateMismatch


def are_replicas(modules: Iterable[Any]) -> bool:
    """Return whether DDP keeps all that is trained of modules alike on all ranks."""
    from torch.nn.parallel import DistributedDataParallel

    every = list(modules)
    reduced = {each for ddp in every if isinstance(ddp, DistributedDataParallel) for each in ddp.parameters()}
    return all(each in reduced for module in every for each in module.parameters() if each.requires_grad)


def outermost(modules: Iterable[Any]) -> list[Any]:
    """Return the modules that are not a part of another of them."""
    every = list(modules)
    inner = {id(part) for module in every for part in module.modules() if part is not module}
    return [each for each in every if id(each) not in inner]


class BucketOrder:
    """Captures and replays the order in which a DDP module's gradients become ready.

    Args:
        ddp: a ``torch.nn.parallel.DistributedDataParallel``.
    """

    def __init__(self, ddp: Any) -> None:
        self._ddp = ddp
        trained = {name: parameter for name, parameter in ddp.named_parameters() if parameter.requires_grad}
        self._names = {trained[key]: name for name, key in keys.canonical(trained).items()}
        self.order: list[str] = []
        self._handles: list[Any] = []

    @staticmethod
    def applies(module: Any) -> bool:
        """Return whether the module is a DDP module that rebuilds its buckets."""
        from torch.nn.parallel import DistributedDataParallel

        return isinstance(module, DistributedDataParallel) and not (
            module.find_unused_parameters and not module.static_graph
        )

    def observe(self) -> None:
        """Capture the order in the next backward; its hooks then remove themselves."""
        for parameter in self._names:
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._append))

    def _append(self, parameter: Any) -> None:
        name = self._names[parameter]
        if name not in self.order:
            self.order.append(name)
        if len(self.order) == len(self._names):
            self.close()

    def close(self) -> None:
        """Remove the hooks of :meth:`observe`, if its backward has not come."""
        while self._handles:
            self._handles.pop().remove()

    def replay(self, order: list[str]) -> None:
        """Run a backward of zeros through every parameter in ``order``, and rebuild the buckets from it.

        Call it before the first step, while no gradients are held. Weights, gradients and random state do not change.

        Raises:
            StateMismatch: the module has different parameters.
        """
        import torch

        by_name = {name: parameter for parameter, name in self._names.items()}
        if set(order) != set(by_name):
            differing = sorted(set(order) ^ set(by_name))[:3]
            raise StateMismatch(
                f"the saved gradient order and the model differ in {', '.join(differing)}. Build the model as it was"
            )
        self.order = list(order)
        # Autograd runs the newest node first, so a chain that is built in reverse accumulates in the saved order.
        with torch.enable_grad():
            terms = [_zero(by_name[name]) for name in reversed(order)]
            total = torch.stack([term.to("cpu", torch.float32) for term in terms]).sum()
            # seam: DDP.reducer (torch 2.13): only a forward prepares the reducer, and a forward would need a batch.
            self._ddp.reducer.prepare_for_backward([])
            torch.autograd.backward(total)
            self._ddp.reducer._rebuild_buckets()  # seam: DDP.reducer (torch 2.13), done by the next forward otherwise
        for parameter in self._names:
            parameter.grad = None


def _zero(parameter: Any) -> Any:
    return (parameter.reshape(-1)[:1] * 0).sum()


def hook_states(modules: Iterable[Any]) -> dict[str, Any]:
    """Return the state of each communication hook, by the name under which a user is told of it.

    Args:
        modules: modules of which some may be ``torch.nn.parallel.DistributedDataParallel``.
    """
    held = [each for module in modules for _, each in getattr(module, "_comm_hooks", ())]  # seam: torch 2.6-2.13
    named = enumerate(each for each in held if each is not None)
    return {f"communication hook {index}" if index else "communication hook": each for index, each in named}

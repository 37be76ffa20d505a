"""The order in which DDP reduces gradients, so that a resumed run sums them in the order of the uninterrupted one.

DDP rebuilds its buckets after the first backward of a process, in the order in which gradients became ready. When a
checkpoint is saved, that is long past. A resumed process would reduce its first step with the initial buckets: it would
add in a different order, and with three or more ranks the sums differ in the last bit. So the order is captured once,
and a resumed process replays it in a backward of zeros before its first real step.

With ``static_graph=True`` the first backward counts how often each gradient comes and reduces all at its end, the
second says the order, and the third has other buckets. So a resumed process replays two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from resume_adapters.core.state import keys
from resume_adapters.core.state.untouched import attributes
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


_NOT_ONCE = (
    "gradients of DDP with static_graph=True come several times in a step, or not at all (of parameters that blocks "
    "share which are checkpointed with use_reentrant=True, or that are not used): on more than two processes their "
    "sums may differ in the last bit after a resume. Train without static_graph"
)


class BucketOrder:
    """Captures and replays the order in which a DDP module's gradients become ready.

    Args:
        ddp: a ``torch.nn.parallel.DistributedDataParallel``.

    Attributes:
        order: the names of the parameters in that order.
        problem: in words, why the order cannot be replayed; empty where it can.
    """

    def __init__(self, ddp: Any) -> None:
        self._ddp = ddp
        trained = {name: parameter for name, parameter in ddp.named_parameters() if parameter.requires_grad}
        self._names = {trained[key]: name for name, key in keys.canonical(trained).items()}
        self.order: list[str] = []
        self.problem = ""
        self._counts: Counter[str] = Counter()
        self._handles: list[Any] = []

    @staticmethod
    def applies(module: Any) -> bool:
        """Return whether the module is a DDP module that rebuilds its buckets."""
        from torch.nn.parallel import DistributedDataParallel

        return isinstance(module, DistributedDataParallel) and not (
            module.find_unused_parameters and not module.static_graph
        )

    def observe(self) -> None:
        """Capture the order in the next backward. Its hooks then remove themselves; :meth:`conclude` does elsewhere."""
        for parameter in self._names:
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._append))

    def _append(self, parameter: Any) -> None:
        name = self._names[parameter]
        self._counts[name] += 1
        if name not in self.order:
            self.order.append(name)
        if len(self.order) == len(self._names) and not self._ddp.static_graph:
            self.close()

    def conclude(self) -> None:
        """Find out, for a save, whether zeros can replay the order of a static graph; forget it if they cannot."""
        if self._ddp.static_graph and self._counts and self._handles:
            self.close()
            if len({self._counts[name] for name in self._names.values()}) > 1:
                self.order, self.problem = [], _NOT_ONCE

    def close(self) -> None:
        """Remove the hooks of :meth:`observe`, if its backward has not come."""
        while self._handles:
            self._handles.pop().remove()

    def replay(self, order: list[str], step: int) -> None:
        """Run backwards of zeros through every parameter in ``order``, and rebuild the buckets from it.

        Call it before the first step, while no gradients are held. Weights, gradients and random state do not change.

        Args:
            step: optimizer steps completed when it was saved, 1 or more.

        Raises:
            StateMismatch: the module has different parameters.
        """
        by_name = {name: parameter for parameter, name in self._names.items()}
        if set(order) != set(by_name):
            differing = sorted(set(order) ^ set(by_name))[:3]
            raise StateMismatch(
                f"the saved gradient order and the model differ in {', '.join(differing)}. Build the model as it was"
            )
        self.order, is_static = list(order), self._ddp.static_graph
        if is_static and self._ddp._static_graph_delay_allreduce_enqueued:  # seam: torch 2.6-2.13
            return  # it has been trained in this process
        for backward in range(min(step, 2) if is_static else 1):
            self._backward([by_name[name] for name in order])
            if is_static and backward == 0:
                self._ddp.reducer._delay_all_reduce()  # seam: DDP.reducer (torch 2.6-2.13), done by the first backward
                self._ddp._static_graph_delay_allreduce_enqueued = True
        if not is_static or step > 1:
            self._ddp.reducer._rebuild_buckets()  # seam: DDP.reducer (torch 2.13), done by the next forward otherwise
        for parameter in self._names:
            parameter.grad = None

    def _backward(self, parameters: list[Any]) -> None:
        import torch

        # Autograd runs the newest node first, so a chain that is built in reverse accumulates in the saved order.
        with torch.enable_grad():
            terms = [(each.reshape(-1)[:1] * 0).sum() for each in reversed(parameters)]
            total = torch.stack([term.to("cpu", torch.float32) for term in terms]).sum()
            # seam: DDP.reducer (torch 2.13): only a forward prepares the reducer, and a forward would need a batch.
            self._ddp.reducer.prepare_for_backward([])
            torch.autograd.backward(total)


def hook_states(modules: Iterable[Any]) -> dict[str, Any]:
    """Return the state of each communication hook, by the name under which a user is told of it.

    Args:
        modules: modules of which some may be ``torch.nn.parallel.DistributedDataParallel``.
    """
    held = [each for module in modules for _, each in attributes(module).get("_comm_hooks", ())]  # seam: torch 2.6-2.13
    named = enumerate(each for each in held if each is not None)
    return {f"communication hook {index}" if index else "communication hook": each for index, each in named}

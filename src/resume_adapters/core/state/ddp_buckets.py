"""The gradient buckets of DDP, so that a resumed run reduces its first step in the order of the uninterrupted one.

DDP builds its buckets anew after the first backward of a process, in the order in which gradients became ready. An
uninterrupted run has long done so when a checkpoint is taken; a resumed process would reduce its first step with the
initial buckets, in another order of additions, and three or more ranks then differ in the last bit. The remedy is to
record the order once and, in a resumed process, to let DDP see it in a backward of zeros before the first real step.
"""

from __future__ import annotations

from typing import Any

from resume_adapters.core.state import keys
from resume_adapters.errors import StateMismatch


class BucketOrder:
    """Records and replays the order in which a DDP module's gradients become ready.

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

    def record(self) -> None:
        """Note the order of the first backward from now on; after it the hooks cost nothing, for they are gone."""
        for parameter in self._names:
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._note))

    def _note(self, parameter: Any) -> None:
        name = self._names[parameter]
        if name not in self.order:
            self.order.append(name)
        if len(self.order) == len(self._names):
            self._remove_hooks()

    def _remove_hooks(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def replay(self, order: list[str]) -> None:
        """Run a backward of zeros through every parameter in ``order``, and rebuild the buckets from it.

        Call it before the first step, with no gradients held. Weights, gradients and random state are left as they
        were.

        Raises:
            StateMismatch: the order names other parameters than the module has.
        """
        import torch

        by_name = {name: parameter for parameter, name in self._names.items()}
        if set(order) != set(by_name):
            odd = sorted(set(order) ^ set(by_name))[:3]
            raise StateMismatch(f"the recorded gradient order and the model differ in {', '.join(odd)}")
        self.order = list(order)
        # Autograd runs what was created last first, so a chain built in reverse accumulates in the recorded order.
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

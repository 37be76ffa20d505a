"""An audit that a run asks for: is what DDP keeps alike still alike on all ranks?

A machine may compute or remember wrongly and go on. What that changes on one rank, DDP never puts right, and a gradient
that was wrong in one step has made weights and moments others for ever: so those are compared, each so many steps and
before each save. What an audited run commits has therefore passed an audit, and a relaunch goes back to it.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

from resume_adapters.core.log import first_of
from resume_adapters.core.observed.steps import watch_steps
from resume_adapters.core.ranks import Ranks
from resume_adapters.core.state import keys
from resume_adapters.core.state.ddp_buckets import are_replicas
from resume_adapters.core.state.fingerprint import value_digest
from resume_adapters.core.state.sharded_digest import fingerprint
from resume_adapters.errors import ReplicasDiffer, UnsupportedSetting

_SHOWN = 6
"""Tensors that an error names at most."""


class ReplicaAudit:
    """Compares the weights and the optimizers' state of one launch over the ranks.

    Args:
        ranks: the ranks, more than one.
        every: optimizer steps from one audit to the next.
        modules: returns what is trained, with the DDP modules around it.

    Attributes:
        close: watches the optimizers no longer.
    """

    def __init__(self, ranks: Ranks, every: int, modules: Callable[[], Iterable[Any]]) -> None:
        self._ranks = ranks
        self._every = every
        self._modules = modules
        self._optimizers: WeakSet[Any] = WeakSet()
        self._passed = -1
        self.close = watch_steps(self._optimizers.add)

    def end_step(self, step: int) -> None:
        """Audit where one is due; see :meth:`require_alike`."""
        if step % self._every == 0:
            self.require_alike(step)

    def require_alike(self, step: int) -> None:
        """Compare what was not yet compared after this step. Every rank calls it.

        Raises:
            ReplicasDiffer: naming the ranks and the tensors.
            UnsupportedSetting: DDP does not keep the training alike on all ranks.
        """
        if step == self._passed:
            return
        own = self._digests()
        if len(set(self._ranks.gather(value_digest(own)))) > 1:
            found = self._ranks.gather((socket.gethostname(), own))
            if differing := _differing([digests for _, digests in found]):
                raise ReplicasDiffer(_described(differing, [host for host, _ in found], step))
        self._passed = step

    def _digests(self) -> dict[str, str]:
        """Return a digest of each parameter, and of each tensor that an optimizer has for it, by name."""
        from torch.nn.parallel import DistributedDataParallel

        modules = list(self._modules())
        reduced = [each for each in modules if isinstance(each, DistributedDataParallel)]
        if not are_replicas(modules) or not all(each.require_backward_grad_sync for each in reduced):
            raise UnsupportedSetting(
                "verify=Audit(...) compares what DDP keeps alike on all ranks, and here it does not: the state is "
                "sharded, DDP is not there, or each rank trains apart, as with LocalSGD. Set verify=True"
            )
        ignored = [getattr(each, "parameters_to_ignore", ()) for each in reduced]  # seam: torch 2.6-2.13
        held = [
            {name: each for name, each in ddp.module.named_parameters() if name not in names}
            for ddp, names in zip(reduced, ignored, strict=True)
        ]
        tensors = keys.of_modules(held)
        found = {name: f"{fingerprint(each.detach())}" for name, each in tensors.items()}
        names = {id(each): name for name, each in tensors.items()}
        for optimizer in self._optimizers:
            for parameter, state in optimizer.state.items():
                name = names.get(id(parameter))
                if name is not None and isinstance(state, Mapping):
                    found.update({f"{key} of {name}": f"{fingerprint(value)}" for key, value in state.items()})
        return found


def _differing(found: Sequence[Mapping[str, str]]) -> dict[str, list[int]]:
    """Return the names of what is not alike where several ranks have it, each with the ranks that may be wrong."""
    differing = {}
    for name in dict.fromkeys(name for each in found for name in each):
        values = {rank: each[name] for rank, each in enumerate(found) if name in each}
        usual, count = Counter(values.values()).most_common(1)[0]
        if count < len(values):
            is_most = 2 * count > len(values)
            differing[name] = [rank for rank, value in values.items() if not is_most or value != usual]
    return differing


def _described(differing: Mapping[str, Sequence[int]], hosts: Sequence[str], step: int) -> str:
    ranks = sorted({rank for each in differing.values() for rank in each})
    named = ", ".join(f"{rank} ({hosts[rank]})" for rank in ranks)
    who = f"rank {named} differs from the others" if len(ranks) == 1 else f"ranks {named} differ"
    return (
        f"after step {step} {who} in {first_of([*differing], _SHOWN)}, which DDP keeps alike: a machine "
        "computes or remembers wrongly, or the script does not do the same on all ranks. Nothing was saved since the "
        "last audit. Launch again without that machine: the run goes on from its newest checkpoint"
    )

"""What the communication hooks of DDP keep from step to step, such as the errors that PowerSGD feeds back.

No framework saves it, and a hook that begins again compresses other gradients. It is looked at as undeclared state is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def hook_states(modules: Iterable[Any]) -> dict[str, Any]:
    """Return the state of each communication hook, by the name under which a user is told of it.

    Args:
        modules: modules of which some may be ``torch.nn.parallel.DistributedDataParallel``.
    """
    held = [each for module in modules for _, each in getattr(module, "_comm_hooks", ())]  # seam: torch 2.6-2.13
    named = enumerate(each for each in held if each is not None)
    return {f"communication hook {index}" if index else "communication hook": each for index, each in named}

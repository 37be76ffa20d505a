"""What an older Accelerate does differently: corrected here where a few lines do it, else refused."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
from accelerate.data_loader import DataLoaderShard
from accelerate.utils import load_fsdp_optimizer

from resume_adapters.core.requirements import is_older
from resume_adapters.errors import UnsupportedSetting

_SHARDING = "1.9"
"""From this version on, FSDP2 loads the full state on every process, and DeepSpeed accumulates under ZeRO-2 and 3."""


def is_before(version: str) -> bool:
    """Return whether the Accelerate that is installed is older than ``version``."""
    return is_older(accelerate.__version__, version)


def require_sharding(strategy: str) -> None:
    """Refuse a strategy that spreads the state over the processes, where Accelerate is too old to load it.

    Args:
        strategy: its name, in a user's words.

    Raises:
        UnsupportedSetting: naming the version that is installed, and the one that serves.
    """
    if is_before(_SHARDING):
        raise UnsupportedSetting(
            f"with accelerate {accelerate.__version__} a run under {strategy} cannot be resumed exactly, which needs "
            f"{_SHARDING} or newer: pip install --upgrade accelerate, or train with DDP"
        )


def load_optimizer(accelerator: Any, optimizer: Any, model: Any, checkpoint: Path, index: int) -> None:
    """Load an optimizer of FSDP2, from shards or from a full state.

    Before 1.13 Accelerate reads the shards into the state that an optimizer has before its first step: none.
    """
    plugin = accelerator.state.fsdp_plugin
    if "SHARDED" not in str(plugin.state_dict_type) or not is_before("1.13"):
        load_fsdp_optimizer(plugin, accelerator, optimizer, model, str(checkpoint), index)
        return
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load

    saved = {"optimizer": get_optimizer_state_dict(model, optimizer.optimizer)}
    load(saved, checkpoint_id=checkpoint / f"optimizer_{index}")
    set_optimizer_state_dict(model, optimizer.optimizer, saved["optimizer"])


def _empty_without_batches(native: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
    @functools.wraps(native)
    def batches(self: Any) -> Iterator[Any]:
        passing = native(self)
        first = next(passing, None)
        if first is None:
            self.end()
            return
        yield first
        yield from passing

    return batches


def install() -> None:
    """Wrap loaders so that an empty one yields no batch, once: before 1.9 it yields ``None``, and then fails."""
    if is_before("1.9") and not hasattr(DataLoaderShard.__iter__, "__wrapped__"):
        loader: Any = DataLoaderShard
        loader.__iter__ = _empty_without_batches(loader.__iter__)  # seam: accelerate 1.6

"""A DeepSpeed engine within a restartable block: when its weights change, and how it saves once its groups are gone.

The engine of an attempt that has failed saves once more, in groups that were made for that save, and is then dropped:
the block makes another one. What DeepSpeed keeps for the whole process is reset in between.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import deepspeed
from deepspeed.comm import comm
from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partition_parameters import Init, free_param
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.utils import groups

from resume_adapters.core.patching import replaced, wrapped
from resume_adapters.core.recovery.updates import UpdateWatch
from resume_adapters.core.requirements import refuse

_COUNTERS = ("param_id", "num_persisted_parameters", "num_persisted_elements")
"""What the class of ``zero.Init`` counts for the whole process, by which ranks compare what they gather."""


_RELEASED = "_PartitionedParameterCoordinator__params_to_release"  # seam: deepspeed 0.19
"""The method of ZeRO 3 whose results are cached for the whole process, by the modules that they are of."""

_ENGINES: weakref.WeakSet[Any] = weakref.WeakSet()
"""Those of the attempt that is under way. The hooks of ZeRO on the weights keep an engine until it is destroyed."""


def require_reenterable(engine: Any) -> None:
    """Refuse engines that keep more for the whole process than :func:`reset_deepspeed` resets.

    Raises:
        UnsupportedSetting: naming the setting and what to do.
    """
    kept = "keeps process groups that @restartable cannot make again"
    refused = {
        f"a device mesh (sequence parallelism) {kept}": engine.mesh_device is not None,
        f"a model parallel unit (mpu) {kept}": engine.mpu is not None,
        f"ZeRO++ {kept}": engine.zero_quantized_gradients() or engine.zero_hpz_partition_size() > 1,
        f"DeepCompile {kept}": engine.is_deepcompile_enabled(),
    }
    refuse(refused, "leave it out, or leave @restartable out")


def watching_updates(engine: Any, updates: UpdateWatch) -> contextlib.AbstractContextManager[None]:
    """Begin an update where the engine begins one, while the context lasts.

    Before torch's optimizer makes its step, and where it makes none, DeepSpeed changes the loss scale; after it, the
    weights of ZeRO, the schedule and the counters.
    """
    _ENGINES.add(engine)

    def step(native: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        updates.begin_holding()
        return native(*args, **kwargs)

    return wrapped(engine, "_take_model_step", step)  # seam: deepspeed 0.19


@contextlib.contextmanager
def saving_after_failure(engine: Any) -> Iterator[None]:
    """Return the context in which ``save_checkpoint`` writes what an engine holds whose groups are gone.

    The engine cannot train afterwards.
    """
    _forget_groups()
    optimizer = engine.optimizer
    with contextlib.ExitStack() as stack:
        if hasattr(optimizer, "dp_process_group"):
            # seam: deepspeed 0.19: dp_process_group; None is the group of all ranks
            stack.enter_context(replaced(optimizer, "dp_process_group", None))
        if engine.zero_optimization_stage() == 3:
            of_sub_groups = [groups.dist.get_world_group()] * len(optimizer.sub_group_process_groups)
            # seam: deepspeed 0.19: sub_group_process_groups; the event at the end would gather what is freed at first
            stack.enter_context(replaced(optimizer, "sub_group_process_groups", of_sub_groups))
            stack.enter_context(replaced(optimizer, "checkpoint_event_prologue", lambda: _free_weights(engine.module)))
            stack.enter_context(replaced(optimizer, "checkpoint_event_epilogue", lambda: None))
        yield


def _free_weights(module: Any) -> None:
    """Leave each rank its shard of the weights, wherever the step was that has gathered them."""
    for each in module.parameters():
        if hasattr(each, "ds_id"):
            each.ds_active_sub_modules.clear()  # seam: deepspeed 0.19
            free_param(each)


def reset_deepspeed() -> None:
    """Drop the engines of an attempt, and let the next one be made as the first of the process was."""
    with replaced(comm, "cdb", _SingleRank()):  # seam: deepspeed 0.19: to destroy an engine, its rank is asked for
        for each in list(_ENGINES):
            each.destroy()
    _ENGINES.clear()
    _forget_released()
    _forget_groups()
    get_cuda_rng_tracker().reset()
    deepspeed.checkpointing.reset()
    parameter_offload.FWD_MODULE_STACK.clear()  # seam: deepspeed 0.19: an engine leaves its module there
    Init.apply_param_persistence = False  # seam: deepspeed 0.19
    for name in _COUNTERS:
        setattr(Init, name, 0)  # seam: deepspeed 0.19


class _SingleRank:
    """What DeepSpeed communicates through, where there is no group."""

    def is_initialized(self) -> bool:
        return True

    def get_rank(self, group: Any = None) -> int:
        return 0


def _forget_released() -> None:
    """Empty the cache in which ZeRO 3 keeps each module that it has released weights of, and so all of the engine."""
    method = vars(PartitionedParameterCoordinator)[_RELEASED]
    inspect.getclosurevars(method).nonlocals["func"].cache_clear()  # seam: deepspeed 0.19: beneath a decorator


def _forget_groups() -> None:
    """Reset DeepSpeed's group of all ranks: the one that it knows was destroyed."""
    groups._WORLD_GROUP = None  # seam: deepspeed 0.19

"""What Accelerate keeps for the whole process, with the process group in it, and how it names what it saves."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, other
from accelerate.utils.constants import FSDP_MODEL_NAME
from torch.distributed.fsdp import StateDictType

from resume_adapters.core.checkpoint import distributed_metadata
from resume_adapters.core.checkpoint.files import CheckpointFiles
from resume_adapters.core.checkpoint.thin import WeightsFiles
from resume_adapters.core.patching import replaced, wrapped
from resume_adapters.core.session.layout import UNNAMED, Layout, spread_over

# seam: accelerate 1.6-1.15, transformers 4.57 to 5.23. Without trainer_state.json the bare Trainer refuses to resume:
# without an optimizer's file alone it would begin with a new one.
WEIGHTS = WeightsFiles(
    re.compile(
        r"(optimizer|scheduler|scaler|sampler|dl_state_dict|random_states|rng_state|trainer_state)(_\d+)*(\.\w+|/.*)"
    )
)
"""Where the weights are in what ``save_state`` and the Trainer save: in what is not known to be something else."""


def reset_accelerate() -> None:
    """Reset what Accelerate knows of the launch, for the next ``Accelerator`` or ``TrainingArguments``."""
    AcceleratorState._reset_state(reset_partial_state=True)  # seam: accelerate 1.6-1.15
    PartialState._reset_state()  # seam: accelerate 1.6-1.15
    GradientState._reset_state()  # seam: accelerate 1.6-1.15


def layout(accelerator: Any, models: Iterable[Any]) -> Layout:
    """Return over which ranks an accelerator and the models' own device meshes spread the training.

    Raises:
        UnsupportedSetting: over ranks that share batches: tensor, context or sequence parallelism.
    """
    config = getattr(accelerator, "parallelism_config", None)
    sizes = {} if config is None else vars(config)
    given = {name.removesuffix("_size"): size for name, size in sizes.items() if name.endswith("_size") and size}
    by_fsdp = ("dp_shard_cp", UNNAMED) if accelerator.distributed_type == DistributedType.FSDP else ()
    return Layout({**spread_over(models), **given}, data=("dp_replicate", "dp_shard", *by_fsdp))


@contextlib.contextmanager
def reading_shards(plugin: Any, files: CheckpointFiles) -> Iterator[None]:
    """Return the context in which Accelerate loads what FSDP saved, as data.

    It is told whether that is sharded or whole: the launch may save otherwise, as FSDP1 does by default.

    Args:
        plugin: the accelerator's plugin for FSDP.
        files: those of the checkpoint.
    """
    is_whole = files.find(f"{FSDP_MODEL_NAME}.bin") is not None
    found = StateDictType.FULL_STATE_DICT if is_whole else StateDictType.SHARDED_STATE_DICT
    with contextlib.ExitStack() as stack:
        stack.enter_context(distributed_metadata.reading(files))
        if plugin.state_dict_type != found:
            for name in ("state_dict_type", "state_dict_config", "optim_state_dict_config"):
                stack.enter_context(replaced(plugin, name, None))
            plugin.set_state_dict_type(found)  # seam: accelerate 1.6-1.15; it fills in the other two
        yield


@functools.cache
def _answer(ask: Callable[[], bool]) -> bool:
    return ask()


def asking_once_for_deepspeed() -> contextlib.AbstractContextManager[None]:
    """Return a context in which Accelerate looks once in a process whether DeepSpeed is installed.

    It reads and parses the package's metadata each time that it unwraps a model: a millisecond of each save.
    """
    return wrapped(other, "is_deepspeed_available", _answer)  # seam: accelerate 1.6-1.15

"""What Accelerate keeps for the whole process, with the process group in it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import other

from resume_adapters.core.patching import wrapped


def reset_accelerate() -> None:
    """Reset what Accelerate knows of the launch, for the next ``Accelerator`` or ``TrainingArguments``."""
    AcceleratorState._reset_state(reset_partial_state=True)  # seam: accelerate 1.6-1.15
    PartialState._reset_state()  # seam: accelerate 1.6-1.15
    GradientState._reset_state()  # seam: accelerate 1.6-1.15


@functools.cache
def _answer(ask: Callable[[], bool]) -> bool:
    return ask()


def asking_once_for_deepspeed() -> contextlib.AbstractContextManager[None]:
    """Return a context in which Accelerate looks once in a process whether DeepSpeed is installed.

    It reads and parses the package's metadata each time that it unwraps a model: a millisecond of each save.
    """
    return wrapped(other, "is_deepspeed_available", _answer)  # seam: accelerate 1.6-1.15

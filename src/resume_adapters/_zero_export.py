"""The whole weights of a checkpoint of which each rank wrote its piece, put together as DeepSpeed does it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

from resume_adapters.errors import MissingFramework, UnsupportedSetting

if TYPE_CHECKING:
    import torch


def whole_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return the weights in single precision, by name, running no code from the checkpoint.

    Raises:
        MissingFramework: DeepSpeed is not installed.
        UnsupportedSetting: a file holds objects whose loading could run code.
    """
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed tells of each piece
        try:
            from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as put_together

            from resume_adapters._zero_files import DATA_CLASSES
        except ImportError as error:
            raise MissingFramework(
                f"{checkpoint.name} is in pieces that only DeepSpeed can put together: "
                "pip install 'resume-adapters[deepspeed]'"
            ) from error
        try:
            with _as_data(DATA_CLASSES):
                weights: dict[str, torch.Tensor] = put_together(str(checkpoint.parent), tag=checkpoint.name)
        except UnpicklingError as error:
            raise UnsupportedSetting(
                f"{checkpoint.name} cannot be read without running code from it: {error}", path=checkpoint
            ) from error
    return weights


@contextlib.contextmanager
def _as_data(classes: list[Any]) -> Iterator[None]:
    """Let ``torch.load`` read data only, also where DeepSpeed asks it to unpickle freely."""
    import torch

    former = os.environ.get("TORCH_FORCE_WEIGHTS_ONLY_LOAD")
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    try:
        with torch.serialization.safe_globals(classes):
            yield
    finally:
        del os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"]
        if former is not None:
            os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = former

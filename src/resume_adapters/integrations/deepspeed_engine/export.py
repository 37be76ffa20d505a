"""Merge the weights that DeepSpeed's ZeRO sharded, with DeepSpeed's own function."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING

from resume_adapters.errors import MissingFramework, UnsupportedSetting

if TYPE_CHECKING:
    import torch


def whole_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return the weights in single precision, by name, running no code from the checkpoint.

    Raises:
        MissingFramework: DeepSpeed is not installed.
        UnsupportedSetting: a file holds objects whose loading could run code.
    """
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed prints each shard
        try:
            from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

            from resume_adapters.integrations.deepspeed_engine.files import as_data
        except ImportError as error:
            raise MissingFramework(
                f"the weights of {checkpoint.name} are in shards that only DeepSpeed can merge: "
                "pip install 'deepspeed>=0.19.7,<0.20'"
            ) from error
        try:
            with as_data():
                weights: dict[str, torch.Tensor] = get_fp32_state_dict_from_zero_checkpoint(
                    str(checkpoint.parent), tag=checkpoint.name
                )
        except UnpicklingError as error:
            raise UnsupportedSetting(
                f"{checkpoint.name} cannot be read without running code from it: {error}", path=checkpoint
            ) from error
    return weights

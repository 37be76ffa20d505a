"""Settings of the Hugging Face ``Trainer`` under which no resume is exact."""

from __future__ import annotations

from typing import Any

import accelerate

from resume_adapters.core.requirements import is_older, refuse
from resume_adapters.core.saving.cadence import Cadence


def require_supported(trainer: Any, cadence: Cadence | None) -> None:
    """Refuse settings under which a resume cannot be exact.

    Args:
        cadence: when to save, where that is not left to the trainer.

    Raises:
        UnsupportedSetting: naming the setting and what to do.
    """
    args = trainer.args
    refused = {
        "save_only_model=True leaves no optimizer to resume with": args.save_only_model,
        'save_strategy="no" never saves': args.save_strategy == "no" and cadence is None,
        "ignore_data_skip=True starts the epoch again (a trainer that sets it itself cannot be resumed)": (
            args.ignore_data_skip
        ),
        "auto_find_batch_size=True changes the batches on the way": args.auto_find_batch_size,
        "save_on_each_node=True is needless, also on disks of the nodes": args.save_on_each_node
        and args.world_size > 1,
        "enable_jit_checkpoint=True saves between steps and ends as if finished; the callback's own stop replaces it": (
            getattr(args, "enable_jit_checkpoint", False)
        ),
        f"FSDP1 flattens the parameters: use FSDP2, {_choice_of_fsdp2(args)}, which starts from its checkpoints, too": (
            trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2
        ),
        f"accelerate {accelerate.__version__}, older than 1.13, does not load the optimizer of FSDP2": (
            trainer.is_fsdp_enabled and is_older(accelerate.__version__, "1.13")
        ),
        f"accelerate {accelerate.__version__}, older than 1.9, drives DeepSpeed otherwise than the trainer expects": (
            trainer.is_deepspeed_enabled and is_older(accelerate.__version__, "1.9")
        ),
    }
    refuse(refused, "change it, or leave the callback out")


def _choice_of_fsdp2(args: Any) -> str:
    """Return how a user chooses FSDP2; a transformers before 5 passes over ``fsdp_version`` among the arguments."""
    has_setting = hasattr(args, "fsdp_plugin_args")
    return 'fsdp_config={"fsdp_version": 2}' if has_setting else "`accelerate launch --use_fsdp --fsdp_version 2`"

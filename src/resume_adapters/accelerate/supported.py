"""Settings of Accelerate under which no resume is exact."""

from __future__ import annotations

from typing import Any

from resume_adapters.core.requirements import refuse


def require_supported(accelerator: Any) -> None:
    """Refuse settings under which a resume cannot be exact.

    Raises:
        UnsupportedSetting: naming the setting and what to do.
    """
    several = accelerator.num_processes > 1
    refused = {
        "save_on_each_node=True scatters a checkpoint over nodes": (
            several and accelerator.project_configuration.save_on_each_node
        ),
        "even_batches=False gives the ranks different numbers of steps, and they save and stop together": (
            several and not accelerator.even_batches
        ),
    }
    refuse(refused)

"""What transformers computes once in a process, at its first save: imported by the server that forks the jobs."""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("transformers.conversion_mapping"):  # since 5.0
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("gpt2")

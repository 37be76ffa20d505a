"""How the saves of jobs leave the training that do not say so: ``nox -s staged`` sets ``RESUME_ADAPTERS_STAGE``."""

from __future__ import annotations

import os
from typing import Any

STAGE = os.environ.get("RESUME_ADAPTERS_STAGE", "")
"""How they do; empty: as by default."""

OPTIONS: dict[str, Any] = {"stage": STAGE} if STAGE else {}
"""The options of a job that is given none."""

"""Lightning under either of its names, ``lightning.pytorch`` or ``pytorch_lightning``."""

from __future__ import annotations

import importlib
from typing import Any

from resume_adapters.core.requirements import require_version
from resume_adapters.errors import MissingFramework
from resume_adapters.integrations.lightning_files import imported_or_installed

NAMES = ("lightning.pytorch", "pytorch_lightning")

OLDEST = "2.4"
"""The oldest version that resumes exactly."""


def _import() -> Any:
    """Return the one that the script has imported, or a library of it: both are installed with ``lightning``."""
    name = imported_or_installed(NAMES)
    if name is None:
        raise MissingFramework("resume_adapters.lightning needs lightning: pip install 'lightning>=2.4,<3'")
    return importlib.import_module(name)


pl: Any = _import()
require_version("lightning", pl.__version__, OLDEST, extra="lightning")
io: Any = importlib.import_module(f"{pl.__name__}.plugins.io")
MaxSizeCycle: Any = importlib.import_module(f"{pl.__name__}.utilities.combined_loader")._MaxSizeCycle
"""The iterator of a CombinedLoader in the mode ``max_size_cycle``."""  # seam: lightning 2.4-2.6
VERSION = f"lightning {pl.__version__}"

"""Lightning under either of its names, ``lightning.pytorch`` or ``pytorch_lightning``, and what differs by version."""

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


def end_turn(loop: Any) -> None:
    """Clear a loop's marks of a restart, as Lightning does after the first turn."""
    if hasattr(loop, "on_iteration_done"):
        loop.on_iteration_done()  # seam: lightning 2.5-2.6
    else:
        loop._restarting = False  # seam: lightning 2.4, which has no other mark


def unsaved(callback: Any) -> dict[str, Any]:
    """Return what a ModelCheckpoint remembers and does not save."""
    names = ("_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation")
    return {name: getattr(callback, name) for name in names if hasattr(callback, name)}  # seam: lightning 2.4-2.6


def leaves_out_frozen(strategy: Any) -> bool:
    """Return whether DeepSpeed's strategy saves no frozen weights; not every version has that option."""
    return bool(getattr(strategy, "exclude_frozen_parameters", False))

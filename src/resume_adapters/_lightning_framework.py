"""Lightning under either of its two names: ``lightning.pytorch``, or ``pytorch_lightning`` where only that is there."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from resume_adapters.errors import MissingFramework

NAMES = ("lightning.pytorch", "pytorch_lightning")


def _import() -> Any:
    for name in NAMES:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            return importlib.import_module(name)
    raise MissingFramework("resume_adapters.lightning needs lightning: pip install 'resume-adapters[lightning]'")


pl: Any = _import()
io: Any = importlib.import_module(f"{pl.__name__}.plugins.io")
VERSION = f"lightning {pl.__version__}"

"""The identity of a run: one text for all starts of a run directory, on all nodes.

What is kept of a run outside of its directory is found by it. Where the directory is removed, and made again under the
same name, the run is another one.
"""

from __future__ import annotations

import re
from pathlib import Path

from resume_adapters.core.checkpoint.layout import CONTROL
from resume_adapters.core.storage.base import Storage, write_atomically

_FILE = "identity"

_FORM = re.compile(r"[0-9a-f]{16}")


def read_identity(storage: Storage, run_directory: Path) -> str | None:
    """Return the identity of the run in a directory; ``None`` if it has none yet."""
    file = run_directory / CONTROL / _FILE
    found = storage.read(file).decode(errors="replace").strip() if storage.is_file(file) else ""
    return found if _FORM.fullmatch(found) else None


def write_identity(storage: Storage, run_directory: Path, identity: str) -> None:
    """Give the run in a directory an identity: 16 hexadecimal digits."""
    write_atomically(storage, run_directory / CONTROL / _FILE, f"{identity}\n".encode())

"""The identity of a run: one text for all starts of a run directory, on all nodes.

What is kept of a run outside of its directory is found by it. Where the directory is removed, and made again under the
same name, the run is another one; and so is a copy of the directory, as long as the original is there.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from resume_adapters.core.checkpoint.layout import CONTROL
from resume_adapters.core.storage.base import Storage, write_atomically

_FILE = "identity"

_FORM = re.compile(r"[0-9a-f]{16}")


def read_identity(storage: Storage, run_directory: Path) -> str | None:
    """Return the identity of the run in a directory; ``None`` if it has none yet."""
    return _read(storage, run_directory)[0]


def original_of(storage: Storage, run_directory: Path) -> Path | None:
    """Return the run directory of which this one is a copy; ``None`` if it is none, or was moved."""
    identity, written = _read(storage, run_directory)
    if identity is None or written is None:
        return None
    with contextlib.suppress(PermissionError):  # what another user has in memory is apart in any case
        # One directory may be mounted at several places.
        is_same = storage.stamp(written / CONTROL / _FILE) == storage.stamp(run_directory / CONTROL / _FILE)
        return written if read_identity(storage, written) == identity and not is_same else None
    return None


def write_identity(storage: Storage, run_directory: Path, identity: str) -> None:
    """Give the run in a directory an identity: 16 hexadecimal digits. A no-op if it has that one, and was not moved."""
    here = storage.real_path(run_directory)
    if _read(storage, run_directory) != (identity, here):
        write_atomically(storage, run_directory / CONTROL / _FILE, f"{identity}\n{here}\n".encode())


def _read(storage: Storage, run_directory: Path) -> tuple[str | None, Path | None]:
    """Return the identity in a run directory, and the run directory in which it was written."""
    file = run_directory / CONTROL / _FILE
    content = storage.read(file).decode(errors="replace") if storage.is_file(file) else ""
    identity, _, written = content.partition("\n")
    return (
        identity.strip() if _FORM.fullmatch(identity.strip()) else None,
        Path(written.rstrip("\n")) if written.startswith("/") else None,
    )

"""What could not be removed from a run directory: it takes up space, and nothing else is wrong with it."""

from __future__ import annotations

from pathlib import Path

from resume_adapters.core.log import logger


class Leftovers:
    """Counts what one start could not remove, and warns once for each.

    A container that ran as another user may have left files in an old checkpoint, or NFS keeps a file that is still
    open. Training goes on; the next start tries again.
    """

    def __init__(self) -> None:
        self._found: set[Path] = set()

    def __len__(self) -> int:
        return len(self._found)

    def add(self, path: Path, error: OSError | None) -> None:
        """Count what could not be removed; ``None`` for an error: it is removed.

        Args:
            path: what was to be removed.
            error: the first of the errors.
        """
        if error is None or path in self._found:
            return
        self._found.add(path)
        logger.warning(
            "%s could not be removed: %s: %s. The run continues, and the next start tries again; remove it yourself to "
            "free its space.",
            path.name,
            error.filename or path,
            error.strerror,
        )

"""What the session needs of a framework and of what is used with it."""

from __future__ import annotations

from typing import Any, Protocol


class Trackers(Protocol):
    """The experiment trackers that the training logs to: the only ones who know W&B, MLflow and TensorBoard."""

    def capture(self) -> dict[str, Any]:
        """Return which runs are logged to, once all that was logged is on its way to a disk."""

    def restore(self, saved: dict[str, Any]) -> None:
        """Let the trackers continue those runs, and log nothing there a second time."""

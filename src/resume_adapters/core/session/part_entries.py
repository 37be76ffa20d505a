"""The parts of a training in words: which are captured, and which saved parts are dropped."""

from __future__ import annotations

from collections.abc import Mapping

from resume_adapters.core.checkpoint.manifest import PartEntry
from resume_adapters.core.session.context import RestoreContext
from resume_adapters.core.session.framework import Framework
from resume_adapters.core.session.options import ResumeOptions
from resume_adapters.core.state.stateful import Stateful

_CAPTURED = {
    "rng": "python, numpy, torch and every CUDA device, on every rank",
    "data": "position of the training loaders, with the random state of their workers",
    "trackers": "run ids of W&B and MLflow, directories of TensorBoard",
}
"""What is captured under every framework alike."""

_OF_LOOP = ("counters", "metrics", "observed")
"""What a session or a training loop captures by itself, as far as there is any."""


class PartEntries:
    """Describes the parts of a session for the manifest and for the user.

    Args:
        framework: saves its own parts.
        options: have the parts that the user named.
    """

    def __init__(self, framework: Framework, options: ResumeOptions) -> None:
        self._framework = framework
        self._options = options

    def captured(self, parts: Mapping[str, Stateful], **notes: str) -> list[PartEntry]:
        """Return an entry for each part that this package captures.

        Args:
            parts: those of the framework and of the training loop, beside those that the user named.
            notes: what the package captures of others, such as ``counters``, in a user's words.
        """
        named = {name: f"{type(part).__name__}.state_dict()" for name, part in {**self._options.parts, **parts}.items()}
        return [PartEntry(name, "core", note) for name, note in {**notes, **_CAPTURED, **named}.items()]

    def log_dropped(self, context: RestoreContext) -> None:
        """Log the parts of the checkpoint that this launch does not restore."""
        manifest = context.checkpoint.manifest
        if manifest is None:
            return
        named = {each.name for each in self._framework.describe()}
        here = {*named, *self._options.parts, *self._framework.parts(), *_CAPTURED, *_OF_LOOP}
        for each in manifest.parts:
            if each.by != "missing" and each.name not in here:
                context.reader.log_dropped(each.name)

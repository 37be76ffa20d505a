"""What a session needs of a framework: its files and live objects, and where its training loop is.

An adapter implements both protocols. It translates; it decides nothing: whether to save, what to resume from and what
to keep is the core's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from resume_adapters.core.checkpoint.manifest import PartEntry
from resume_adapters.core.checkpoint.parts import CheckpointReader
from resume_adapters.core.checkpoint.thin import WeightsFiles
from resume_adapters.core.checkpoint.validity import ForeignDetector
from resume_adapters.core.choices import Stage
from resume_adapters.core.observed.walk import Subjects
from resume_adapters.core.saving.staging import StagingOptions
from resume_adapters.core.session.layout import Layout
from resume_adapters.core.session.records import RankState
from resume_adapters.core.session.settings import LaunchSettings
from resume_adapters.core.state.stateful import Stateful
from resume_adapters.errors import UnsupportedSetting

if TYPE_CHECKING:
    from resume_adapters.core.session.context import RestoreContext


class Trackers(Protocol):
    """The experiment trackers that the training logs to: the only ones who know W&B, MLflow and TensorBoard."""

    def capture(self) -> dict[str, Any]:
        """Return which runs are logged to, once all that was logged is on its way to a disk."""

    def restore(self, saved: dict[str, Any]) -> None:
        """Point the trackers to those runs."""

    def close(self) -> None:
        """Undo what :meth:`restore` changed in the trackers."""


@dataclass(frozen=True)
class FrameworkFacts:
    """What is known of a framework and its settings before a training call begins.

    Attributes:
        label: name and version, for the manifests: ``"transformers 5.23.0"``.
        channel: name of the logger whose handlers show what the framework logs.
        registers: what registers a further part of the state, as a user writes it.
        directory_option: what sets the run directory, likewise.
        accumulation: batches of the training loop in an optimizer step.
        accumulates_across_epochs: an accumulation goes on from one pass over the data into the next.
        topology: settings that the order of the data may depend on beside the number of ranks, by the name under which
            a user sets them; by default the accumulation.
        invariants: settings that a resume must find unchanged, likewise.
        layout: over which ranks the training is spread.
    """

    label: str
    channel: str
    registers: str
    directory_option: str
    accumulation: int = 1
    accumulates_across_epochs: bool = False
    topology: Mapping[str, int] = field(default_factory=dict)
    invariants: Mapping[str, int] = field(default_factory=dict)
    layout: Layout = field(default_factory=Layout)

    def __post_init__(self) -> None:
        if not self.topology:
            object.__setattr__(self, "topology", {"gradient_accumulation_steps": self.accumulation})


class ForkState(NamedTuple):
    """What a new run can take of a checkpoint of another.

    Attributes:
        models: each model with what was saved of it; nothing where it was saved under another name.
        optimizers: returns each optimizer with what was saved of it, likewise.
    """

    models: Sequence[tuple[Any, Mapping[str, Any]]]
    optimizers: Callable[[], Sequence[tuple[Any, Mapping[str, Any]]]]


class Framework(Protocol):
    """A framework's files and live objects.

    Attributes:
        about: what is known of it.
        trackers: the experiment trackers.
        foreign: recognises checkpoints that the bare framework wrote.
    """

    about: FrameworkFacts
    trackers: Trackers
    foreign: ForeignDetector

    def state_dict(self) -> Mapping[str, Any]:
        """Return tensors with the names, dtypes and whole shapes of the model's."""

    def staging(self, stage: Stage) -> StagingOptions:
        """Return how saves are copied, as far as the framework knows: who reads the files, and who writes them."""

    def save(self, directory: Path) -> None:
        """Write the framework's own files into a pending checkpoint. Every rank calls it."""

    def weights_files(self) -> WeightsFiles | None:
        """Return where a checkpoint holds the weights; ``None`` where they cannot be kept without the rest."""

    def rehearse(self, context: RestoreContext) -> None:
        """Load the save that was just written as a resume would, into copies, and compare them with what lives.

        A process that does not hold the files may return at once: it must not wait for others.

        Raises:
            NotRehearsed: no copies can be made, or the state is spread over processes.
            ResumeError: a component does not come back; the message says why, and what to do.
        """

    def loaded_files(self, directory: Path) -> Iterable[Path]:
        """Return the files of a pending checkpoint that a resume reads with ``torch.load``."""

    def is_read(self, place: str) -> bool:
        """Return whether a resume reads what those files have under a key, or an object at a place such as ``key.0``.

        What it leaves may be of any class.
        """

    def owner_of(self, file: Path) -> int:
        """Return the rank that wrote a file of the framework, by its path in the checkpoint."""

    def parts(self) -> Mapping[str, Stateful]:
        """Return what the framework does not save and is alike on all ranks."""

    def sharded_state(self) -> Mapping[str, Any]:
        """Return what is sharded over the ranks, by the name of the component."""

    def modules(self) -> Iterable[Any]:
        """Return the modules that are trained, also as they are wrapped to reduce gradients in buckets."""

    def subjects(self) -> Subjects:
        """Return the objects whose undeclared state is looked for. It changes nothing, and draws no random number."""

    def settings(self) -> LaunchSettings:
        """Return what the launch was given, as far as the framework knows."""

    def describe(self) -> Sequence[PartEntry]:
        """Return an entry for each part that the framework saves, and for what nobody captures."""

    def fork_state(self, reader: CheckpointReader) -> ForkState:
        """Return what a fork can take of a checkpoint.

        Raises:
            UnsupportedSetting: no process has the whole of what is trained.
            ResumeError: the checkpoint does not hold it.
        """
        raise UnsupportedSetting(
            f"a new run of {self.about.label} cannot begin with {reader.files.checkpoint} where weights are sharded or "
            "an engine has them: load them in the script, from the file that `resume-adapters export` writes"
        )

    def close(self) -> None:
        """Undo what was patched, hooked or registered in the framework for this training call."""


class CheckpointFacts(NamedTuple):
    """What a manifest says of a checkpoint that only the training loop knows.

    Attributes:
        epoch: epochs completed, with the fraction of the running one.
        metrics: the evaluation of these weights; ``None`` where a value was not a finite number. A tensor is waited for
            where a manifest is written.
        best: name of the best checkpoint so far, which retention keeps.
    """

    epoch: float
    metrics: Mapping[str, Any] = MappingProxyType({})
    best: str | None = None


class TrainingLoop(Protocol):
    """Where the training is: what only the code that runs the loop knows when a checkpoint is saved."""

    def rank_state(self) -> RankState:
        """Return what belongs to this rank alone; after :meth:`Framework.save`, which may draw random numbers."""

    def parts(self) -> Mapping[str, Stateful]:
        """Return the parts of the loop that are alike on all ranks."""

    def describe(self) -> Sequence[PartEntry]:
        """Return an entry for each part that the loop adds, and for what nobody captures."""

    def facts(self) -> CheckpointFacts:
        """Return what the manifest says of a checkpoint that is saved now."""

"""What each rank saves of a ``fit``. The names on disk are those of the format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from resume_adapters.core.dataloader.evaluated import EvaluationLoader
from resume_adapters.core.session.records import LoaderState, RankState
from resume_adapters.core.state.records import Stored
from resume_adapters.integrations.deepspeed_engine.names import EngineRankState
from resume_adapters.lightning.logged_values import LoggedValues
from resume_adapters.lightning.loops import LoopProgress, SavePoint


@dataclass
class FitRankState(RankState):
    """What one rank of a ``fit`` saves for itself.

    Attributes:
        point: value of the :class:`SavePoint`.
        epoch: epochs whose hooks have run.
        loaders: where each training loader is.
        progress: the counters of the loops.
        metrics: the logged values.
        row: what the loggers are still to get of the batch or of the epoch.
        gradients: gradients that a later step uses, by the name of the parameter.
        evaluation_workers: for each validation loader, whether it has persistent workers that are running.
        engine: what DeepSpeed does not save; ``None`` without DeepSpeed.
        should_stop: the trainer was asked to end the training.
        checkpoints: what each ModelCheckpoint remembers and does not save, by its ``state_key``.
        unwanted: names of the checkpoints that are removed once this one is committed; ``None`` as with ``tuned``.
        validated: for each validation loader, the batches that were validated; ``None`` as with ``tuned``.
        csv: the rows of each CSVLogger, by its directory; ``None`` as with ``tuned``.
        tuned: the attributes that finders of a learning rate or a batch size have set, by name; ``None`` where the
            version that saved it did not look for them.
        own_objects: which objects of the training are in Lightning's file, by their place there; ``None`` as with
            ``tuned``.
        validation_data: for each validation loader, what has changed on its dataset and samplers; ``None`` as with
            ``tuned``.
        validation_workers: the loaders with such workers, as far as the state of these is known; ``None`` as with
            ``tuned``.
        limits: the epochs and steps that the trainer was given, and those that a callback has set; ``None`` as with
            ``tuned``.
        fit: which ``fit()`` of its trainer it is of, from 1; ``None`` as with ``tuned``.
    """

    point: Annotated[str, Stored("moment")]
    epoch: int
    loaders: list[LoaderState]
    progress: LoopProgress
    metrics: LoggedValues
    row: dict[str, Any]
    gradients: dict[str, Any]
    evaluation_workers: list[bool]
    engine: EngineRankState | None
    should_stop: bool
    checkpoints: dict[str, Any]
    validated: list[int] | None = None
    csv: dict[str, str] | None = None
    tuned: dict[str, Any] | None = None
    own_objects: dict[str, Any] | None = None
    validation_data: list[list[Any]] | None = None
    validation_workers: list[EvaluationLoader] | None = None
    unwanted: list[str] | None = None
    limits: list[list[int | None]] | None = None
    fit: int | None = None

    @property
    def save_point(self) -> SavePoint:
        """Where in the training it was saved."""
        return SavePoint(self.point)

    @property
    def loader_states(self) -> Sequence[LoaderState]:
        """The states of the training loaders."""
        return self.loaders

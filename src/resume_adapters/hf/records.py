"""What one rank of the Trainer saves for itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from resume_adapters.core.dataloader.evaluated import EvaluationLoader
from resume_adapters.core.session.records import LoaderState, RankState
from resume_adapters.core.state.records import Record
from resume_adapters.integrations.deepspeed_engine.names import EngineRankState


@dataclass
class TrainerCounters(Record):
    """What the trainer resets at the start of its loop.

    Attributes:
        tr_loss: the running loss since the last log.
        total_loss: the loss that was logged.
        last_logged: the step of the last log.
        initial_step: the step from which the trainer counts its speed.
        seconds: the time that earlier launches have trained.
    """

    tr_loss: Any
    total_loss: float
    last_logged: int
    initial_step: int
    seconds: float


@dataclass
class DueEvaluation(Record):
    """An evaluation that a stop has interrupted; the next launch does it again.

    Attributes:
        save: a save was due after it.
    """

    save: bool


@dataclass(kw_only=True)
class TrainerRankState(LoaderState, RankState):
    """What one rank saves for itself, beside where its training loader is.

    Attributes:
        epoch: the epoch that is running or has ended, from 0.
        first_slice: what fills up the last batch of a dispatching loader's running pass.
        between_epochs: it was saved after the epoch's end.
        stopping: the trainer had decided to stop training.
        max_steps: steps after which the training ends, as a callback may have set them.
        asked_steps: as many as the arguments of the launch made; ``None`` where the version that saved it had none.
        engine: what DeepSpeed does not save; ``None`` without DeepSpeed.
        evaluation: an evaluation that is due; ``None`` where none is.
        evaluation_workers: names of the evaluation loaders whose persistent workers were running.
        evaluation_loaders: these loaders, as far as the state of their workers is known; ``None`` where the version
            that saved it did not capture them.
        counters: what the trainer resets at the start of its loop.
        evaluation_data: what has changed on the data of each evaluation loader, by its name.
        later_state: what changes of the trainer's state, as JSON, where something was logged after its files were
            written.
    """

    epoch: int
    first_slice: Any
    between_epochs: bool
    stopping: bool
    max_steps: int
    asked_steps: int | None = None
    engine: EngineRankState | None
    evaluation: DueEvaluation | None = None  # absent where an evaluation was done again before the first step
    evaluation_workers: list[str]
    evaluation_loaders: list[EvaluationLoader] | None = None
    counters: TrainerCounters
    evaluation_data: dict[str, list[Any]] | None = None
    later_state: str | None = None

    @property
    def loader_states(self) -> Sequence[LoaderState]:
        """The state of the training loader."""
        return (self,)

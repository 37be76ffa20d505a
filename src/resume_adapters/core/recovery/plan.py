"""Where all ranks go on after a failure: a pure function of what each of them reports."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec


class Level(enum.Enum):
    """How a block goes on, cheapest first."""

    MEMORY = "memory"
    """All ranks go on with the state that they hold."""
    DISK = "disk"
    """They resume from the latest checkpoint, or start from zero where there is none."""
    GIVEN_UP = "given up"
    """The error is raised."""


class HeldCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint in memory from which a run goes on.

    Attributes:
        path: where.
        generation: the start of the run directory that wrote it, or has resumed from it since; it is of no use once
            there is a later one.
    """

    path: str
    generation: int


class Failure(msgspec.Struct, frozen=True):
    """What went wrong first.

    Attributes:
        rank: where.
        step: optimizer steps completed there; ``None`` before a training call.
        kind: type of the error.
        message: what it says.
        place: the innermost line of code that it came from.
        is_final: running the block again cannot help: a setting is refused, a later start owns the run directory.
    """

    rank: int
    step: int | None
    kind: str
    message: str
    place: str
    is_final: bool = False

    @property
    def signature(self) -> tuple[object, ...]:
        """What is alike of two failures in the same way at the same step."""
        return self.rank, self.step, self.kind, self.message, self.place

    def __str__(self) -> str:
        where = "" if self.step is None else f" after step {self.step}"
        return f"rank {self.rank} failed{where}: {self.kind}: {self.message.partition(chr(10))[0]}"


class Moment(msgspec.Struct, frozen=True):
    """The end of a step, as all ranks see it.

    Attributes:
        step: optimizer steps completed.
        place: where in the training, of several places at which one step's state is held.
    """

    step: int
    place: str = ""

    def __str__(self) -> str:
        return f"step {self.step} {self.place}".strip()


class Report(msgspec.Struct, frozen=True):
    """What one rank says after a failure.

    Attributes:
        directory: the run directory of the training call that was under way; empty where none was.
        moment: the one whose state it holds; ``None`` where it holds none.
        objection: why that state cannot be used; empty where it can.
        failure: its own failure; ``None`` where it has left because of another rank.
        kept: the checkpoints in memory that it has resumed from, by run directory; empty where there is a later one.
        is_updating: its weights may be those of the middle of a step.
        is_replica: weights, optimizers and schedules are alike on all ranks at the end of each step.
        former: earlier moments that it holds too, but for the weights where another step has followed.
    """

    directory: str = ""
    moment: Moment | None = None
    objection: str = ""
    failure: Failure | None = None
    kept: dict[str, HeldCheckpoint] = {}
    is_updating: bool = False
    is_replica: bool = False
    former: tuple[Moment, ...] = ()

    @property
    def reachable(self) -> tuple[Moment, ...]:
        """The moments that it can go back to."""
        return self.former if self.moment is None or self.objection else (self.moment, *self.former)


class Plan(msgspec.Struct, frozen=True):
    """What all ranks do.

    Attributes:
        level: how they go on.
        failure: what went wrong.
        moment: that from which they go on, if it is known; where the block is given up, the last that all hold.
        reason: why they do not go on at a cheaper level; empty where they do.
        source: the rank whose weights all take; ``None``: each goes on with its own.
        kept: the checkpoints in memory to go on from, by run directory; empty: all write what they hold.
    """

    level: Level
    failure: Failure
    moment: Moment | None = None
    reason: str = ""
    source: int | None = None
    kept: dict[str, HeldCheckpoint] = {}


def decide(reports: Sequence[Report], *, restarts: int, max_restarts: int, former: Sequence[Failure]) -> Plan:
    """Return what all ranks do; alike on all of them, since it follows from the arguments alone.

    Args:
        reports: what each rank says, in rank order.
        restarts: how often the block was run again.
        max_restarts: how often it may be.
        former: the failures before this one.
    """
    own = [each.failure for each in reports if each.failure is not None]
    failure = own[0] if own else Failure(0, None, "Unknown", "a rank has left the block and does not say why", "")
    objection = _objection(reports)
    moment, source = _taken_back(reports) if objection else (reports[0].moment, None)
    # What all have resumed from, and is later than the disk, where they hold no step since.
    is_kept = moment is None and all(each.kept for each in reports)
    kept = {path: _newest(path, reports) for path in reports[0].kept} if is_kept else {}
    final = next((each for each in own if each.is_final), None)
    reason = ""
    if final is not None:
        failure, reason = final, "running it again cannot help"
    elif any(each.signature == failure.signature for each in former):
        reason = "the same step has failed twice in the same way"
    elif restarts >= max_restarts:
        reason = f"the block was run again {restarts} times, which is the limit"
    if reason:
        return Plan(Level.GIVEN_UP, failure, moment, reason, source, kept)
    if moment is not None or kept:
        return Plan(Level.MEMORY, failure, moment, source=source, kept=kept)
    return Plan(Level.DISK, failure, reason=objection)


def _newest(path: str, reports: Sequence[Report]) -> HeldCheckpoint:
    """A failure may have come before all ranks knew under which generation they have resumed."""
    return max((each.kept[path] for each in reports if path in each.kept), key=lambda each: each.generation)


def _taken_back(reports: Sequence[Report]) -> tuple[Moment | None, int | None]:
    """Return the moment to which all ranks can go back, and the rank whose weights they take, if they need any.

    One that leaves at the end of a step is behind those that have gone further within that step; one that fails before
    its update is a step behind those that have ended theirs, and replicas take its weights.
    """
    # None that is behind can reach what others have come to, so what all can reach is where the last of them is.
    moments = [each.moment for each in reports if each.moment is not None]
    moment = next((each for each in moments if all(each in one.reachable for one in reports)), None)
    if moment is None or len({each.directory for each in reports}) > 1:
        return None, None
    whole = [not each.is_updating and each.moment is not None and each.moment.step == moment.step for each in reports]
    if all(whole):
        return moment, None
    can_take = any(whole) and all(each.is_replica for each in reports)
    return (moment, whole.index(True)) if can_take else (None, None)


def _objection(reports: Sequence[Report]) -> str:
    """Return why the ranks cannot go on with what they hold; nothing where they can."""
    for rank, each in enumerate(reports):
        if each.moment is None:
            return f"rank {rank} has not completed a step of its training yet"
        if each.is_updating:
            return f"rank {rank}: it had begun to update the weights, and had not done all that follows an update"
        if each.objection:
            return f"rank {rank}: {each.objection}"
    if len({each.directory for each in reports}) > 1:
        return "the ranks are in different trainings"
    if len({each.moment for each in reports}) > 1:
        held = ", ".join(f"rank {rank} {each.moment}" for rank, each in enumerate(reports))
        return f"the ranks hold different steps: {held}"
    return ""

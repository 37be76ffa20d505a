"""The options of a run, alike under every framework, and the callback that carries them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from resume_adapters.core.checkpoint.retention import Policy
from resume_adapters.core.choices import OnBatchChange, OnSaveError, Stage
from resume_adapters.core.requirements import did_you_mean
from resume_adapters.core.run.run import ResumableRun
from resume_adapters.core.saving.cadence import Cadence, SaveEvery, chosen
from resume_adapters.core.session.environment import MIRROR, SAVE_EVERY
from resume_adapters.core.state.rng import GeneratorState, is_generator
from resume_adapters.core.state.stateful import Stateful, is_stateful, named_parts
from resume_adapters.core.stop.policy import StopOn
from resume_adapters.core.tiers.options import Mirror, mirror_of, require_mirrors
from resume_adapters.errors import UnsupportedSetting

ResumeFrom = Literal["auto", "scratch", "scratch!"] | str | os.PathLike[str]
"""What a run is to resume from: a word, or the path of a checkpoint."""

_WORDS = ("auto", "scratch", "scratch!")
"""What ``resume`` may be beside a path."""


@dataclass(frozen=True)
class ResumeOptions:
    """The options that every adapter takes.

    Attributes:
        resume: ``"auto"``: the latest valid checkpoint, else zero. ``"scratch"``: zero, refused if there are committed
            checkpoints. ``"scratch!"``: zero; each launch moves the checkpoints that it finds to
            ``.resume/set-aside``. A path: that checkpoint, until the run has one of its own.
        keep: a retention policy; ``None`` for the adapter's default.
        stop: what asks the run to save and leave: signals, the walltime, a stop file.
        save_every: optimizer steps, a ``timedelta``, or ``"auto"``; ``None`` for the adapter's default.
        mtbf: mean time between failures, for ``save_every="auto"``; by default what the run itself has seen.
        verify: after restoring, compare the live state with the saved one, and refuse a difference.
        on_batch_change: ``"refuse"``, or ``"keep-samples"``: with a different number of samples in an optimizer step,
            resume by samples.
        on_save_error: ``"stop"``, or ``"continue"``: after a save that failed, say so, keep training, and try again at
            the next save. Three failures in a row end the run in any case.
        stage: ``"auto"``: training goes on after a copy in memory, which is written in the background, where nothing
            reads the files before their commit, or as with ``"disk"`` where memory is short; ``"memory"``: a copy in
            any case; ``"disk"``: training goes on at once, and the next optimizer step waits for the write; ``"off"``:
            it waits for the write.
        mirror: where committed checkpoints are copied to in the background, such as ``[Remote("s3://bucket/runs/a")]``;
            a start takes the newest checkpoint of all.
        parts: further Statefuls by name.

    Raises:
        UnsupportedSetting: ``resume`` is neither one of its words nor a path, or ``mirror`` is no list of tiers.
    """

    resume: ResumeFrom = "auto"
    keep: Policy | None = None
    stop: StopOn | None = None
    save_every: SaveEvery | None = None
    mtbf: timedelta | None = None
    verify: bool = True
    on_batch_change: OnBatchChange = "refuse"
    on_save_error: OnSaveError = "stop"
    stage: Stage = "auto"
    mirror: Sequence[Mirror] = ()
    parts: Mapping[str, Stateful] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_mirrors(self.mirror)
        given = self.resume
        is_name = isinstance(given, str) and Path(given).name == given and given not in _WORDS
        question = did_you_mean(str(given), _WORDS) if is_name else ""
        if isinstance(given, str | os.PathLike) and not question:
            return
        hint = f"{question} A path of that name is ./{given}. Expected" if question else "expected"
        raise UnsupportedSetting(
            f'resume={given!r}: {hint} "auto", the default (the latest checkpoint, or a start from zero), "scratch" (a '
            'start from zero), "scratch!" (checkpoints are set aside first), or the path of a checkpoint'
        )

    @property
    def generators(self) -> dict[str, GeneratorState]:
        """The generators among the parts."""
        return {name: part for name, part in self.parts.items() if isinstance(part, GeneratorState)}

    def mirrors(self) -> tuple[Mirror, ...]:
        """Return where committed checkpoints are copied to. The environment comes before ``mirror``.

        Raises:
            UnsupportedSetting: the variable of the environment names no tier.
        """
        given = os.environ.get(MIRROR)
        return tuple(self.mirror) if given is None else tuple(map(mirror_of, given.split()))

    def cadence(self) -> Cadence | None:
        """Return when to save; ``None`` where the framework decides that. The environment comes before ``save_every``.

        Raises:
            UnsupportedSetting: ``save_every`` or ``mtbf`` is not what :class:`Cadence` understands, or the variable of
                the environment is no positive number.
        """
        given = os.environ.get(SAVE_EVERY)
        if given is None:
            return chosen(self.save_every, self.mtbf)
        if not given.isdecimal():
            raise UnsupportedSetting(f"{SAVE_EVERY}={given!r}; expected a positive number of optimizer steps")
        return Cadence(int(given))


def parts_among(keywords: Mapping[str, Any], *further: str) -> dict[str, Stateful]:
    """Return the parts among the keywords that an adapter was given beside its options.

    Args:
        keywords: the keywords.
        further: the options that the adapter has in addition to :class:`ResumeOptions`.

    Raises:
        UnsupportedSetting: a keyword is a misspelt option, or cannot be a part.
    """
    known = [*(each.name for each in fields(ResumeOptions) if each.name != "parts"), *further]
    for name, value in keywords.items():
        question = "" if is_stateful(value) or is_generator(value) else did_you_mean(name, known)
        if question:
            raise UnsupportedSetting(
                f"{name}={value!r} is no option: {question} The options are {', '.join(known)}; a further part of the "
                "state needs state_dict() and load_state_dict()"
            )
    return named_parts(dict(keywords))


class OptionsCallback:
    """A callback with which a training call of any framework resumes; an adapter derives its own, and documents it.

    Attributes:
        options: the options of the run.
        further_options: the options of an adapter that are not among :class:`ResumeOptions`.
        needless_warnings: what the framework warns of and a resume does not need, as regular expressions. They are
            ignored from the first callback on: a framework may warn before it calls one.
    """

    further_options: tuple[str, ...] = ()
    needless_warnings: tuple[str, ...] = ()

    def __init__(
        self,
        *,
        resume: ResumeFrom = "auto",
        keep: Policy | None = None,
        stop: StopOn | None = None,
        save_every: SaveEvery | None = None,
        mtbf: timedelta | None = None,
        verify: bool = True,
        on_batch_change: OnBatchChange = "refuse",
        on_save_error: OnSaveError = "stop",
        stage: Stage = "auto",
        mirror: Sequence[Mirror] = (),
        **parts: Any,
    ) -> None:
        found = parts_among(parts, *self.further_options)
        self.options = ResumeOptions(
            resume, keep, stop, save_every, mtbf, verify, on_batch_change, on_save_error, stage, mirror, parts=found
        )
        for message in self.needless_warnings:
            warnings.filterwarnings("ignore", message)

    @property
    def active_run(self) -> ResumableRun | None:
        """The run that is under way; ``None`` between two training calls."""
        return None

    def halt(self, reason: str) -> None:
        """Stop the run for a human to look at: it saves, leaves with exit code 3, and refuses to start again.

        ``resume-adapters stop --undo RUN_DIR`` lets it go on.

        Args:
            reason: what the human is to look at.
        """
        if self.active_run is not None:
            self.active_run.flag.halt(reason)

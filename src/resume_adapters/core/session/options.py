"""The options of a run, alike under every framework, and the callback that carries them."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import msgspec

from resume_adapters.core.checkpoint.retention import KeepLast, Policy, join_policies, parse_best, parse_period
from resume_adapters.core.choices import Audit, Fork, OnBatchChange, OnSaveError, Requeue, Stage, Take, Verify
from resume_adapters.core.requirements import did_you_mean
from resume_adapters.core.run.run import ResumableRun
from resume_adapters.core.saving.cadence import Cadence, SaveEvery, chosen
from resume_adapters.core.state.rng import GeneratorState, is_generator
from resume_adapters.core.state.stateful import Stateful, is_stateful, named_parts
from resume_adapters.core.stop.policy import StopOn
from resume_adapters.core.tiers.options import Memory, Mirror, Remote, mirror_of, require_mirrors
from resume_adapters.errors import UnsupportedSetting

ResumeFrom = Literal["auto", "scratch", "scratch!"] | str | os.PathLike[str] | Fork
"""What a run is to resume from: a word, the path of a checkpoint, or what it takes of one."""

_WORDS = ("auto", "scratch", "scratch!")
"""What ``resume`` may be beside a path."""


@dataclass(frozen=True)
class ResumeOptions:
    """The options that every adapter takes.

    Attributes:
        resume: ``"auto"``: the latest valid checkpoint, else zero. ``"scratch"``: zero, refused if there are committed
            checkpoints. ``"scratch!"``: zero; each launch moves the checkpoints that it finds to
            ``.resume/set-aside``. A path: that checkpoint, until the run has one of its own. A :class:`Fork`: its
            weights, likewise.
        keep: a retention policy; ``None`` for the adapter's default, which it documents.
        stop: what asks the run to save and leave: signals, the walltime, a stop file.
        save_every: optimizer steps, a ``timedelta``, or ``"auto"``: as often as is worth its cost; ``None`` for the
            adapter's default.
        mtbf: mean time between failures, for ``save_every="auto"``; by default what the run itself has seen.
        verify: after restoring, compare the live state with the saved one, and refuse a difference. An :class:`Audit`
            compares the ranks, too.
        on_batch_change: ``"refuse"``, or ``"keep-samples"``: where an optimizer step has a different number of samples
            than when the run was saved, resume by samples, with schedules of this launch's length.
        on_save_error: ``"stop"``, or ``"continue"``: after a save that failed, say so, keep training, and try again at
            the next save. Three failures in a row end the run in any case.
        stage: ``"auto"``: training goes on after a copy in memory, which is written in the background, where nothing
            reads the files before their commit and memory is not short; ``"memory"``: a copy wherever there is memory
            for it; ``"off"``: training waits for the write.
        mirror: where committed checkpoints are copied to in the background, such as ``[Remote("s3://bucket/runs/a")]``;
            a start takes the newest checkpoint of all.
        parts: every other keyword: further Statefuls by name, for example ``ema=ema``; also plain torch, numpy and
            python generators.

    Raises:
        UnsupportedSetting: ``resume`` is neither one of its words nor a path, or ``mirror`` is no list of tiers.
    """

    resume: ResumeFrom = "auto"
    keep: Policy | None = None
    stop: StopOn | None = None
    save_every: SaveEvery | None = None
    mtbf: timedelta | None = None
    verify: Verify = True
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
        if isinstance(given, str | os.PathLike | Fork) and not question:
            return
        hint = f"{question} A path of that name is ./{given}. Expected" if question else "expected"
        raise UnsupportedSetting(
            f'resume={given!r}: {hint} "auto", the default (the latest checkpoint, or a start from zero), "scratch" (a '
            'start from zero), "scratch!" (checkpoints are set aside first), the path of a checkpoint, or a Fork of it'
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
        session: what the adapter has of the training call under way, with its ``run``; ``None`` between two.
        needless_warnings: what the framework warns of and a resume does not need, as regular expressions. They are
            ignored from the first callback on: a framework may warn before it calls one.
    """

    needless_warnings: tuple[str, ...] = ()
    session: Any = None

    def __init__(
        self,
        *,
        resume: ResumeFrom = "auto",
        keep: Policy | None = None,
        stop: StopOn | None = None,
        save_every: SaveEvery | None = None,
        mtbf: timedelta | None = None,
        verify: Verify = True,
        on_batch_change: OnBatchChange = "refuse",
        on_save_error: OnSaveError = "stop",
        stage: Stage = "auto",
        mirror: Sequence[Mirror] = (),
        **parts: Any,
    ) -> None:
        found = parts_among(parts)
        self.set_options(
            ResumeOptions(
                resume, keep, stop, save_every, mtbf, verify, on_batch_change, on_save_error, stage, mirror, parts=found
            )
        )

    def set_options(self, options: ResumeOptions) -> None:
        """Set the options: an adapter that has more of them calls this in place of the constructor."""
        self.options = options
        for message in self.needless_warnings:
            warnings.filterwarnings("ignore", message)

    @property
    def active_run(self) -> ResumableRun | None:
        """The run that is under way; ``None`` between two training calls."""
        return None if self.session is None else self.session.run

    def halt(self, reason: str) -> None:
        """Stop the run for a human to look at: it saves, leaves with exit code 3, and refuses to start again.

        ``resume-adapters stop --undo RUN_DIR`` lets it go on.

        Args:
            reason: what the human is to look at.
        """
        if self.active_run is not None:
            self.active_run.flag.halt(reason)


RUN_DIRECTORY, SAVE_EVERY = "RESUME_ADAPTERS_RUN_DIR", "RESUME_ADAPTERS_SAVE_EVERY"
MIRROR = "RESUME_ADAPTERS_MIRROR"
"""The environment variables that come before the run directory, ``save_every`` and ``mirror`` of the script. The last
is a URL, or several with spaces between them; ``memory`` is one of them."""


def run_directory_override(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the run directory that the environment names, absolute; ``None`` where the script decides.

    Args:
        environment: the environment.

    Raises:
        UnsupportedSetting: it is a URL.
    """
    given = environment.get(RUN_DIRECTORY)
    if given and "://" in given:
        raise UnsupportedSetting(
            f"{RUN_DIRECTORY}={given!r}; expected a directory on a mounted file system. For copies "
            f"in an object store set {MIRROR}={given}"
        )
    return Path(os.path.abspath(given)) if given else None


OPTIONS = "RESUME_ADAPTERS_OPTIONS"
"""The options of the callbacks that ``RESUME_ADAPTERS=1`` adds."""


class TextOptions(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, frozen=True):
    """The options of a callback as text and numbers, for an environment variable, a command line or a YAML file.

    Attributes:
        resume: ``"auto"``, ``"scratch"``, ``"scratch!"`` or a path.
        take: what a :class:`Fork` takes of that path.
        keep_last, keep_best, keep_every, keep_within: a retention policy, as ``resume-adapters prune`` takes it.
        save_every: optimizer steps, a period such as ``"30m"``, or ``"auto"``.
        mtbf: mean time between failures, a period.
        verify: after restoring, compare the live state with the saved one.
        audit_every: optimizer steps between two audits of the ranks; see :class:`Audit`.
        on_batch_change, on_save_error, stage: as the callbacks have them.
        mirror: URLs to which committed checkpoints are copied, and ``memory`` as :func:`mirror_of` has it.
        mirror_every: of how many saves one is copied.
        mirror_keep_last: how many copies are kept; by default all.
        exit_code, walltime, reserve, requeue: as :class:`StopOn` has them.
    """

    resume: str = "auto"
    take: Take | None = None
    keep_last: int | None = None
    keep_best: list[str] = []
    keep_every: int | None = None
    keep_within: str | None = None
    save_every: int | str | None = None
    mtbf: str | None = None
    verify: bool = True
    audit_every: int | None = None
    on_batch_change: OnBatchChange = "refuse"
    on_save_error: OnSaveError = "stop"
    stage: Stage = "auto"
    mirror: list[str] = []
    mirror_every: int = 1
    mirror_keep_last: int | None = None
    exit_code: int = 0
    walltime: str | None = None
    reserve: str = "auto"
    requeue: Requeue | None = None

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments for a callback.

        Raises:
            UnsupportedSetting: a policy, a period or a duration is invalid.
        """
        as_given = ("on_batch_change", "on_save_error", "stage")
        return {
            "resume": self.resume if self.take is None else Fork(self.resume, self.take),
            "verify": self.verify if self.audit_every is None else Audit(self.audit_every),
            **{name: getattr(self, name) for name in as_given},
            "keep": self._keep(),
            "stop": StopOn(
                exit_code=self.exit_code, walltime=self.walltime, reserve=self.reserve, requeue=self.requeue
            ),
            "save_every": self._save_every(),
            "mtbf": None if self.mtbf is None else parse_period(self.mtbf),
            "mirror": self._mirrors(),
        }

    def _mirrors(self) -> tuple[Mirror, ...]:
        keep = None if self.mirror_keep_last is None else KeepLast(self.mirror_keep_last)
        found = [mirror_of(text) for text in self.mirror]
        stores = [replace(each, every=self.mirror_every, keep=keep) for each in found if isinstance(each, Remote)]
        return (*stores, *[each for each in found if isinstance(each, Memory)])

    def _keep(self) -> Policy | None:
        given = (self.keep_last, self.keep_every, self.keep_within)
        return self.policy() if self.keep_best or any(each is not None for each in given) else None

    def policy(self) -> Policy:
        """Return the retention policy.

        Raises:
            UnsupportedSetting: there is none, or it is invalid.
        """
        bests = [parse_best(text) for text in self.keep_best]
        return join_policies(self.keep_last, bests, self.keep_every, self.keep_within)

    def _save_every(self) -> SaveEvery | None:
        given = self.save_every
        if given is None or isinstance(given, int):
            return given
        if given == "auto":
            return "auto"
        try:
            return int(given) if re.fullmatch(r"\d{1,18}", given) else parse_period(given)
        except UnsupportedSetting as error:
            raise UnsupportedSetting(
                f'invalid save_every {given!r}: expected a number of optimizer steps, a period such as 30m, or "auto"'
            ) from error


def options_of_environment(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the keyword arguments that the environment has for a callback; none of it without the variable.

    Args:
        environment: the environment.

    Raises:
        UnsupportedSetting: the variable is not a JSON object of options, or one of them is invalid.
    """
    given = environment.get(OPTIONS)
    if not given:
        return {}
    try:
        found = msgspec.json.decode(given, type=TextOptions)
    except msgspec.MsgspecError as error:
        raise _invalid(f"{OPTIONS}={given}", error) from error
    return found.arguments()


def options_of_mapping(given: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the keyword arguments that a mapping, such as a part of a YAML file, has for a callback.

    Args:
        given: the mapping.
        source: where it is, in a user's words.

    Raises:
        UnsupportedSetting: it is not a mapping of options, or one of them is invalid.
    """
    try:
        return msgspec.convert(given, TextOptions).arguments()
    except msgspec.MsgspecError as error:
        raise _invalid(source, error) from error


def _invalid(source: str, error: msgspec.MsgspecError) -> UnsupportedSetting:
    names = ", ".join(TextOptions.__struct_fields__)
    return UnsupportedSetting(f'{source}: {error}. Expected options, such as {{"keep_last": 3}}, among {names}')

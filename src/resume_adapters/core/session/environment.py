"""What the environment says of a run: its directory, how often to save, and the options of callbacks that it adds."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec

from resume_adapters.core.checkpoint import policy_text
from resume_adapters.core.checkpoint.retention import KeepLast, Policy
from resume_adapters.core.choices import OnBatchChange, OnSaveError, Requeue, Stage
from resume_adapters.core.saving.cadence import SaveEvery
from resume_adapters.core.stop.policy import StopOn
from resume_adapters.core.tiers.options import Memory, Mirror, Remote, mirror_of
from resume_adapters.errors import UnsupportedSetting

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
        keep_last, keep_best, keep_every, keep_within: a retention policy, as ``resume-adapters prune`` takes it.
        save_every: optimizer steps, a period such as ``"30m"``, or ``"auto"``.
        mtbf: mean time between failures, a period.
        verify: after restoring, compare the live state with the saved one.
        on_batch_change, on_save_error, stage: as the callbacks have them.
        mirror: URLs to which committed checkpoints are copied, and ``memory`` as :func:`mirror_of` has it.
        mirror_every: of how many saves one is copied.
        mirror_keep_last: how many copies are kept; by default all.
        exit_code, walltime, reserve, requeue: as :class:`StopOn` has them.
    """

    resume: str = "auto"
    keep_last: int | None = None
    keep_best: list[str] = []
    keep_every: int | None = None
    keep_within: str | None = None
    save_every: int | str | None = None
    mtbf: str | None = None
    verify: bool = True
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
        return {
            "resume": self.resume,
            "keep": self._keep(),
            "stop": StopOn(
                exit_code=self.exit_code, walltime=self.walltime, reserve=self.reserve, requeue=self.requeue
            ),
            "save_every": self._save_every(),
            "mtbf": None if self.mtbf is None else policy_text.period(self.mtbf),
            "verify": self.verify,
            "on_batch_change": self.on_batch_change,
            "on_save_error": self.on_save_error,
            "stage": self.stage,
            "mirror": self._mirrors(),
        }

    def _mirrors(self) -> tuple[Mirror, ...]:
        keep = None if self.mirror_keep_last is None else KeepLast(self.mirror_keep_last)
        found = [mirror_of(text) for text in self.mirror]
        stores = [replace(each, every=self.mirror_every, keep=keep) for each in found if isinstance(each, Remote)]
        return (*stores, *[each for each in found if isinstance(each, Memory)])

    def _keep(self) -> Policy | None:
        given = (self.keep_last, self.keep_every, self.keep_within)
        if not self.keep_best and all(each is None for each in given):
            return None
        bests = [policy_text.best(text) for text in self.keep_best]
        return policy_text.join(self.keep_last, bests, self.keep_every, self.keep_within)

    def _save_every(self) -> SaveEvery | None:
        given = self.save_every
        if given is None or isinstance(given, int):
            return given
        if given == "auto":
            return "auto"
        return int(given) if re.fullmatch(r"\d{1,18}", given) else _period_or_word(given)


def _period_or_word(text: str) -> timedelta:
    try:
        return policy_text.period(text)
    except UnsupportedSetting as error:
        raise UnsupportedSetting(
            f'invalid save_every {text!r}: expected a number of optimizer steps, a period such as 30m, or "auto"'
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

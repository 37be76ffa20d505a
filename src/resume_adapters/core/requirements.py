"""Versions and settings of a framework under which a resume cannot be exact, and options of the wrong type."""

from __future__ import annotations

import re
from collections.abc import Mapping

from resume_adapters.errors import MissingFramework, UnsupportedSetting


def is_older(found: str, version: str) -> bool:
    """Return whether a version is older than another, by as many of its numbers as that one has, as ``"5.3"``."""

    def ordered(each: str) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", each)[: version.count(".") + 1]]

    return ordered(found) < ordered(version)


def require_version(package: str, found: str, oldest: str, *, extra: str) -> None:
    """Refuse a framework that is older than its adapter can resume exactly.

    Args:
        package: name of the framework's package.
        found: the version that is installed.
        oldest: the oldest that serves, as ``"5.3"``.
        extra: the extra of this package that brings the framework, which is also the adapter's module.

    Raises:
        MissingFramework: naming both versions and the remedy.
    """
    if is_older(found, oldest):
        raise MissingFramework(
            f"resume_adapters.{extra} found {package} {found}, and needs {oldest} or newer: "
            f"pip install --upgrade 'resume-adapters[{extra}]'"
        )


def require_type(option: str, value: object, kind: type, example: str) -> None:
    """Refuse an option of another type than its own; ``None`` stands for one that is left out.

    Raises:
        UnsupportedSetting: with what was expected.
    """
    if value is not None and not isinstance(value, kind):
        raise UnsupportedSetting(f"{option}={value!r} is no {kind.__name__}; expected one, such as {example}")


def refuse(settings: Mapping[str, object], remedy: str = "change it") -> None:
    """Refuse the first of these settings that is found.

    Args:
        settings: for each what it does, and whether it is set: a true or a false value.
        remedy: what the user can do.

    Raises:
        UnsupportedSetting: naming the setting and the remedy.
    """
    for reason, found in settings.items():
        if found:
            raise UnsupportedSetting(f"{reason}, so this run cannot be resumed exactly: {remedy}")

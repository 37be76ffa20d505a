"""Refuse framework versions and settings under which a resume cannot be exact, and options that are wrong."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Mapping

from resume_adapters.errors import MissingFramework, UnsupportedSetting


def is_older(found: str, version: str) -> bool:
    """Return whether a version is older than a release; its development and pre-releases are not older."""
    from packaging.version import Version

    return Version(Version(found).base_version) < Version(version)


def require_version(package: str, found: str, oldest: str, *, extra: str) -> None:
    """Refuse a framework that is older than its adapter can resume exactly.

    Args:
        package: name of the framework's package.
        oldest: the oldest version that works, such as ``"5.3"``.
        extra: the name of the adapter's module.

    Raises:
        MissingFramework: naming both versions and how to upgrade.
    """
    if is_older(found, oldest):
        raise MissingFramework(
            f"resume_adapters.{extra} found {package} {found}, and needs {oldest} or newer: "
            f"pip install --upgrade '{package}>={oldest}'"
        )


def require_platform(platform: str = sys.platform) -> None:
    """Refuse Windows, before a run begins: importing this package, and reading a run directory, works there.

    Args:
        platform: the name that Python has for the system.

    Raises:
        UnsupportedSetting: the system cannot do what a commit needs.
    """
    if platform == "win32":
        raise UnsupportedSetting(
            "resume-adapters does not train on Windows: a commit needs directories that can be forced onto the disk, "
            "and renamed while they are open. Train in WSL 2, on a disk of its own"
        )


def require_type(option: str, value: object, kind: type, example: str) -> None:
    """Refuse an option of the wrong type; ``None`` means that it was not given.

    Raises:
        UnsupportedSetting: naming the expected type, with an example.
    """
    if value is not None and not isinstance(value, kind):
        raise UnsupportedSetting(f"{option} must be a {kind.__name__}, such as {example}; got {value!r}")


def refuse(settings: Mapping[str, object], remedy: str = "change it") -> None:
    """Refuse the first of these settings that is set.

    Args:
        settings: whether each is set, after the words that say what it does.
        remedy: what the user can do.

    Raises:
        UnsupportedSetting: naming the setting and the remedy.
    """
    for reason, found in settings.items():
        if found:
            raise UnsupportedSetting(f"{reason}, so this run cannot be resumed exactly: {remedy}")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the question whether the most similar of the known words was meant; empty where none is similar."""
    similar = difflib.get_close_matches(word, list(known), n=1, cutoff=0.7)
    return f"did you mean `{similar[0]}`?" if similar else ""

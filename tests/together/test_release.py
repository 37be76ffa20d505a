"""A tag is released only if the package and the changelog have its version."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import resume_adapters

ROOT = Path(__file__).parents[2]
TEXT = """# Changelog

## [Unreleased]

## [1.2.0] - 2026-01-02

### Added

- One.

## [1.1.0] - 2025-01-02

- Two.
"""


@pytest.fixture(scope="module")
def release() -> Any:
    return SimpleNamespace(**runpy.run_path(str(ROOT / "tools" / "release.py")))


def test_the_notes_are_the_section_of_the_version(release: Any) -> None:
    assert release.section(TEXT, "1.2.0") == "### Added\n\n- One."
    assert release.section(TEXT, "1.1.0") == "- Two."


@pytest.mark.parametrize("version", ["1.3.0", "Unreleased", "1.2"])
def test_a_version_without_a_dated_section_is_refused(release: Any, version: str) -> None:
    with pytest.raises(ValueError, match="no heading"):
        release.section(TEXT, version)


def test_another_version_of_the_package_is_refused(release: Any) -> None:
    release.require_version('__version__ = "1.2.0"\n', "1.2.0")
    with pytest.raises(ValueError, match=r"the package is version 1\.2\.0, and the tag is v1\.3\.0"):
        release.require_version('__version__ = "1.2.0"\n', "1.3.0")


def test_the_citation_has_the_version_of_the_package() -> None:
    assert f"\nversion: {resume_adapters.__version__}\n" in (ROOT / "CITATION.cff").read_text()

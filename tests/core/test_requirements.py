"""Versions and settings of a framework that are refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from resume_adapters.core.requirements import require_type, require_version
from resume_adapters.core.stop.policy import StopOn
from resume_adapters.errors import MissingFramework, UnsupportedSetting


@pytest.mark.parametrize("found", ["5.3.0", "5.3", "5.10.1", "6.0.0.dev0", "5.3.0rc1", "5.23.0+local"])
def test_a_version_that_serves(found: str) -> None:
    require_version("framework", found, "5.3", extra="hf")


@pytest.mark.parametrize("found", ["5.2.9", "4.57.6", "5", "0.99"])
def test_an_older_version_is_refused_with_both_versions_and_the_remedy(found: str) -> None:
    with pytest.raises(MissingFramework) as caught:
        require_version("framework", found, "5.3", extra="hf")
    remedy = "pip install --upgrade 'framework>=5.3'"
    assert str(caught.value) == f"resume_adapters.hf found framework {found}, and needs 5.3 or newer: {remedy}"
    assert isinstance(caught.value, ImportError)


def test_an_option_of_another_type_is_refused_with_what_was_expected() -> None:
    require_type("stop", None, StopOn, "StopOn()")
    require_type("stop", StopOn(), StopOn, "StopOn()")
    with pytest.raises(UnsupportedSetting, match=r"^stop must be a StopOn, such as StopOn\(\); got 15$"):
        require_type("stop", 15, StopOn, "StopOn()")


def test_each_remedy_installs_what_this_package_declares() -> None:
    """Not ``resume-adapters[extra]``: an index may not have it, and a checkout is not what pip would bring."""
    tomllib = pytest.importorskip("tomllib")  # python 3.11
    root = Path(__file__).parents[2]
    declared = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = declared["optional-dependencies"].values()
    known = {*declared["dependencies"], *(each for extra in extras for each in extra)}
    for file in (root / "src").rglob("*.py"):
        for line in re.findall(r"pip install ((?:'[^'{]+' ?)+)", file.read_text()):
            assert {*re.findall("'([^']+)'", line)} <= known, (file, line)

"""CONTRIBUTING describes the code as it is: each package of the map is there, and each member of the protocol."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import resume_adapters
from resume_adapters.core.session.framework import Framework

PACKAGE = Path(resume_adapters.__file__).parent
PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"

pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="a wheel does not bring it")


def test_the_map_names_each_package_and_no_other() -> None:
    text = PAGE.read_text().partition("## How the code is laid out")[2].split("```")[1]
    named = set(re.findall(r"(\w+)/", text)) - {"src", "resume_adapters"}
    found = {file.parent.name for file in PACKAGE.rglob("__init__.py")} - {"resume_adapters"}
    assert named == found - {"commands"}
    modules = {name.strip() for name in re.findall(r"^  ([\w., ]+\.py) ", text, re.M) for name in name.split(",")}
    ours = {file.name for file in PACKAGE.glob("*.py")}
    assert modules == {name for name in ours if not name.startswith("_")}


def test_the_members_of_the_protocol_are_those_of_the_code() -> None:
    rows = re.findall(r"^    \| (`.+?) \| ", PAGE.read_text().partition("## Adding an adapter")[2], re.M)
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert len(listed) == len(set(listed))
    members = {*vars(Framework), *Framework.__annotations__}
    assert set(listed) == {name for name in members if not name.startswith("_")}

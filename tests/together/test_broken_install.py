"""A broken install breaks only itself: not ``import torch``, no Trainer of Lightning, no pytest of another project."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from resume_adapters.unedited import ENTRY, reaching

pytest.importorskip("lightning")

UNRELATED = """
import sys, pytest, torch
from lightning.pytorch import Trainer
print(len(Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, barebones=True).callbacks))
code = pytest.main(["-q", "-p", "no:cacheprovider", sys.argv[1]])
print(code == 0, sorted(name for name in sys.modules if name.startswith("resume_adapters")))
"""


def moved(package: Path) -> None:
    """Leave nothing there, as where a checkout was that is installed as editable."""


def invalid(package: Path) -> None:
    package.mkdir()
    (package / "__init__.py").write_text("not Python")


def raising(package: Path) -> None:
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('broken')")


def incomplete(package: Path) -> None:
    package.mkdir()
    (package / "__init__.py").touch()


def unreadable(package: Path) -> None:
    package.mkdir()
    (package / "__init__.py").mkdir()
    (package / "unedited.py").symlink_to("unedited.py")


def of_an_unrelated_project(directory: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Import torch, make a Trainer and run pytest, with what lies in the directory before all other packages."""
    (directory / "test_own.py").write_text("def test_own():\n    pass\n")
    path = os.pathsep.join([*filter(None, [environment.get("PYTHONPATH")]), str(directory)])
    words = [sys.executable, "-c", UNRELATED, str(directory / "test_own.py")]
    given = {**os.environ, **environment, "PYTHONPATH": path}
    return subprocess.run(words, cwd=directory, env=given, capture_output=True, text=True, timeout=300, check=False)


def install(directory: Path) -> None:
    """Put what the installed package tells others of itself into the directory."""
    info = directory / "resume_adapters-0.dist-info"
    info.mkdir(parents=True)
    distribution = importlib.metadata.distribution("resume-adapters")
    for name in ("METADATA", "entry_points.txt"):
        (info / name).write_text(distribution.read_text(name) or "")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "broken",
    [
        raising,
        moved,
        unreadable,
        *(pytest.param(each, marks=pytest.mark.long) for each in (invalid, incomplete)),
    ],
    ids=lambda each: each.__name__,
)
def test_what_is_not_ours_runs_as_if_the_package_were_not_there(broken: object, tmp_path: Path) -> None:
    assert callable(broken)
    install(tmp_path)
    broken(tmp_path / "resume_adapters")
    done = of_an_unrelated_project(tmp_path, RESUME_ADAPTERS="1")
    assert done.returncode == 0 and "True []" in done.stdout, done.stderr + done.stdout
    assert "resume-adapters" not in done.stderr


@pytest.mark.thorough
def test_under_run_it_says_that_it_is_broken_and_breaks_nothing(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    raising(tmp_path / "site" / "resume_adapters")
    shutil.copytree(ENTRY, tmp_path / "entry")
    environment = reaching({}) | {"PYTHONPATH": os.pathsep.join(map(str, [tmp_path / "entry", tmp_path / "site"]))}
    done = of_an_unrelated_project(tmp_path / "site", **environment)
    assert done.returncode == 0 and "True ['resume_adapters_entry']" in done.stdout, done.stderr + done.stdout
    assert done.stderr.count("this process does not resume: RuntimeError: broken") == 2

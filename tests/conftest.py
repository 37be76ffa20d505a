"""What all tests share: one thread per process, and when a framework that is not installed is a failure."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from launch import is_installed

os.environ.setdefault("OMP_NUM_THREADS", "1")
pytest.register_assert_rewrite("contract", "chain", "miniature", "recovering")  # their assertions show what differs

FRAMEWORKS = {
    "hf": ("transformers", "accelerate"),
    "lightning": ("lightning",),
    "accelerate": ("accelerate",),
    "deepspeed": ("deepspeed",),
    "fabric": ("lightning",),
    "torch_loop": (),
    "device": (),
}
"""The modules that the tests of each folder need."""

HERE = Path(__file__).parent

MEMORY = Path("/dev/shm")
"""A file system in memory, where there is one: forcing files onto it costs nothing."""


def work_in_memory() -> None:
    """Let the directories of tests be in memory, where there are 4 GB for them and scripts may be run there."""
    if not MEMORY.is_dir() or "PYTEST_DEBUG_TEMPROOT" in os.environ:
        return
    state = os.statvfs(MEMORY)
    if state.f_bavail * state.f_frsize < 4 * 2**30 or state.f_flag & os.ST_NOEXEC:
        return
    root = MEMORY / f"resume-adapters-tests-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    os.environ["PYTEST_DEBUG_TEMPROOT"] = str(root)


work_in_memory()


def missing(folder: str) -> list[str]:
    """Return the modules that a folder of tests needs and that are not installed."""
    return [name for name in FRAMEWORKS.get(folder, ()) if not is_installed(name)]


def required() -> set[str]:
    """Return the folders that RESUME_ADAPTERS_REQUIRE names: without their framework they fail instead of skipping."""
    named = {name.strip() for name in os.environ.get("RESUME_ADAPTERS_REQUIRE", "").split(",")} - {""}
    unknown = named - set(FRAMEWORKS)
    if unknown:
        raise pytest.UsageError(f"RESUME_ADAPTERS_REQUIRE names {sorted(unknown)}; expected some of {[*FRAMEWORKS]}")
    return named


def pytest_configure(config: pytest.Config) -> None:
    absent = {folder: missing(folder) for folder in required()}
    lines = [f"{folder} needs {', '.join(names)}" for folder, names in absent.items() if names]
    if lines:
        raise pytest.UsageError(f"RESUME_ADAPTERS_REQUIRE asks for what is not installed: {'; '.join(lines)}")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out what is not asked for, and a folder whose framework is missing: it could not even be imported."""
    asked_for = {HERE / "slurm": "RESUME_ADAPTERS_SLURM", HERE / "strangers": "RESUME_ADAPTERS_STRANGERS"}
    if collection_path in asked_for and not os.environ.get(asked_for[collection_path]):
        return True
    relative = collection_path.relative_to(HERE) if collection_path.is_relative_to(HERE) else Path()
    return True if relative.parts and missing(relative.parts[0]) else None


@pytest.fixture
def job(request: pytest.FixtureRequest) -> Any:
    """Return what a module of laws says of its job."""
    return request.module.JOB


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Keep what earlier tests imported out of each look through all objects: a test makes its own."""
    gc.collect()
    gc.freeze()


class FolderScheduling(LoadScopeScheduling):
    """Keep the tests of an adapter, or of the shell, to one worker: it imports frameworks once, and shares their runs.

    ``xdist_group`` would say the same, but xdist 3.8 writes the group where pytest 9 no longer looks for it.
    """

    def _split_scope(self, nodeid: str) -> str:
        folder = nodeid.removeprefix("tests/").partition("/")[0]
        return folder if folder in {*FRAMEWORKS, "cli", "together"} else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FolderScheduling | None:
    """Give each worker whole adapters, where several are tested; the tests of one framework alone go to all workers."""
    asked = [Path(argument.partition("::")[0]).resolve() for argument in config.args]
    groups = [[HERE / name for name in FRAMEWORKS if FRAMEWORKS[name] == needs] for needs in {*FRAMEWORKS.values()}]
    one_alone = any(all(any(path.is_relative_to(folder) for folder in group) for path in asked) for group in groups)
    return None if one_alone else FolderScheduling(config, log)


def pytest_report_header() -> list[str]:
    absent = {folder: missing(folder) for folder in FRAMEWORKS if (HERE / folder).is_dir()}
    return [f"skipped: tests/{folder} ({', '.join(names)} missing)" for folder, names in absent.items() if names]

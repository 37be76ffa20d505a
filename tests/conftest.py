"""What all tests share: one thread per process, and when a framework that is not installed is a failure."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

FRAMEWORKS = {
    "hf": ("transformers", "accelerate"),
    "lightning": ("lightning",),
    "accelerate": ("accelerate",),
    "deepspeed": ("deepspeed",),
}
"""The modules that the tests of each folder need."""

HERE = Path(__file__).parent


def missing(folder: str) -> list[str]:
    """Return the modules that a folder of tests needs and that are not installed."""
    return [name for name in FRAMEWORKS.get(folder, ()) if importlib.util.find_spec(name) is None]


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
    if collection_path == HERE / "slurm" and not os.environ.get("RESUME_ADAPTERS_SLURM"):
        return True
    relative = collection_path.relative_to(HERE) if collection_path.is_relative_to(HERE) else Path()
    return True if relative.parts and missing(relative.parts[0]) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of an adapter to one worker, which imports its framework once and shares its reference runs.

    Where the tests of one adapter alone are asked for, all workers run them.
    """
    folders = [item.path.relative_to(HERE).parts[0] if item.path.is_relative_to(HERE) else "" for item in items]
    if len(set(folders) & set(FRAMEWORKS)) > 1:
        for item, folder in zip(items, folders, strict=True):
            if folder in FRAMEWORKS:
                item.add_marker(pytest.mark.xdist_group(folder))


def pytest_report_header() -> list[str]:
    absent = {folder: missing(folder) for folder in FRAMEWORKS if (HERE / folder).is_dir()}
    return [f"skipped: tests/{folder} ({', '.join(names)} missing)" for folder, names in absent.items() if names]

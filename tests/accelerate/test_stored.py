"""A run that an older version of the package has begun goes on with this one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate

import contract


def test_an_older_run_goes_on(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    contract.older_run_goes_on(bench, tmp_path / "run", reference, "accelerate", accelerate.__version__)

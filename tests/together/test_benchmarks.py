"""Every module of the benchmarks can be imported: what it takes from the package is there."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from launch import Server

ROOT = Path(__file__).parents[2]
NEEDS = ("transformers", "lightning", "accelerate", "matplotlib", "rich")
SCRIPT = """
import importlib, pkgutil, sys
sys.path.insert(0, {root!r})
import benchmarks
found = [module.name for module in pkgutil.iter_modules(benchmarks.__path__)]
assert "__main__" in found and "steps" in found, found
for name in found:
    importlib.import_module(f"benchmarks.{{name}}")
"""


@pytest.mark.thorough
def test_every_module_of_the_benchmarks_is_imported(server: Server, tmp_path: Path) -> None:
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} missing")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(root=str(ROOT)))
    server.start(script, [], tmp_path, 1, {}).wait().require_success()

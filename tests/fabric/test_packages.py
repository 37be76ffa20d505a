"""Fabric under either of its names, ``lightning.fabric`` and ``lightning_fabric``, where both are imported."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import lightning.fabric  # noqa: F401  # it is imported first
import pytest
import torch

from resume_adapters.fabric.framework import FILE, FabricFramework
from resume_adapters.fabric.objects import NAMES, FabricObjects


@pytest.mark.parametrize("name", NAMES)
def test_the_package_of_the_fabric_writes_directly(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(name)

    def never(*given: Any) -> None:
        raise AssertionError("it is written in memory first")

    monkeypatch.setattr(importlib.import_module(f"{name}.plugins.io.torch_io"), "_atomic_save", never)
    fabric = importlib.import_module(name).Fabric(accelerator="cpu", devices=1)
    plain = torch.nn.Linear(1, 1)
    model, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters()))
    framework = FabricFramework(fabric, FabricObjects({"model": model, "optimizer": optimizer}))
    framework.save(tmp_path)
    assert (tmp_path / FILE).stat().st_size and framework.channel == name

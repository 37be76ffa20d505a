"""How Fabric's file is written, under either of its names: ``lightning.fabric`` and ``lightning_fabric``."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.io import TorchCheckpointIO

from resume_adapters.fabric.framework import FabricFramework
from resume_adapters.fabric.objects import NAMES, trained_objects


def framework_of(fabric: Any) -> FabricFramework:
    plain = torch.nn.Linear(1, 1)
    model, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters()))
    named = {"model": model, "optimizer": optimizer}
    return FabricFramework(fabric, trained_objects(named, fabric.strategy.precision), named)


class UploadingIO(TorchCheckpointIO):
    """It reads each file that it has written."""

    def save_checkpoint(self, *arguments: Any, **keywords: Any) -> None:
        super().save_checkpoint(*arguments, **keywords)


@pytest.mark.parametrize(
    ("plugins", "objection"), [([], ""), ([UploadingIO], "UploadingIO.save_checkpoint() may read each checkpoint")]
)
def test_nothing_is_copied_by_itself_where_somebody_may_read_it(plugins: list[Any], objection: str) -> None:
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[each() for each in plugins])
    assert framework_of(fabric).staging("auto").objection() == objection


@pytest.mark.parametrize("name", NAMES)
def test_the_package_of_the_fabric_writes_directly(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(name)

    def never(*given: Any) -> None:
        raise AssertionError("it is written in memory first")

    monkeypatch.setattr(importlib.import_module(f"{name}.plugins.io.torch_io"), "_atomic_save", never)
    framework = framework_of(importlib.import_module(name).Fabric(accelerator="cpu", devices=1))
    framework.save(tmp_path)
    assert (tmp_path / framework.file).stat().st_size and framework.about.channel == name

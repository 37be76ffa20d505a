"""The plugin for axolotl, with a stand-in for what axolotl 0.12 does with a plugin: it cannot be installed everywhere.

What the stand-in stands for, in ``axolotl.integrations.base`` and where axolotl builds its trainer: a plugin is made
without arguments, after its module was imported by the dotted name in the YAML; its input arguments are a pydantic
model, by dotted name, whose fields the configuration then has; and the callbacks that it returns before there is a
trainer are given to the trainer.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from resume_adapters import KeepLast
from resume_adapters.core.session import finished
from resume_adapters.errors import MissingFramework, UnsupportedSetting


class BasePlugin:
    """Has a no-op for each event of axolotl."""

    def register(self, cfg: Any) -> None: ...


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The plugin as axolotl makes it from its name in the YAML."""
    base = ModuleType("axolotl.integrations.base")
    vars(base)["BasePlugin"] = BasePlugin
    for name, module in {"axolotl": ModuleType("axolotl"), "axolotl.integrations.base": base}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "axolotl.integrations", ModuleType("axolotl.integrations"))
    monkeypatch.delitem(sys.modules, "resume_adapters.axolotl", raising=False)
    module, _, name = "resume_adapters.axolotl.ResumePlugin".rpartition(".")
    yield getattr(importlib.import_module(module), name)()
    sys.modules.pop("resume_adapters.axolotl", None)


def test_its_trainer_resumes_with_the_options_of_the_yaml(plugin: Any, tmp_path: Path) -> None:
    module, _, name = plugin.get_input_args().rpartition(".")
    read = getattr(importlib.import_module(module), name)(resume_adapters={"keep_last": 1, "save_every": 2})
    (callback,) = plugin.add_callbacks_pre_trainer(read.model_dump(), None)
    assert (callback.options.keep, callback.options.save_every) == (KeepLast(1), 2)
    finished._FINISHED.clear()

    class Line(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": super().forward(x).square().mean()}

    args = TrainingArguments(str(tmp_path), max_steps=4, use_cpu=True, report_to="none", disable_tqdm=True)
    Trainer(Line(1, 1), args, train_dataset=[{"x": torch.ones(1)}] * 8, callbacks=[callback]).train()
    assert [each.name for each in tmp_path.glob("checkpoint-*")] == ["checkpoint-4"]
    assert (tmp_path / "checkpoint-4" / "resume" / "manifest.json").is_file()


def test_a_yaml_without_options_is_enough_and_a_wrong_option_is_named(plugin: Any) -> None:
    (callback,) = plugin.add_callbacks_pre_trainer({}, None)
    assert callback.options.keep is None
    with pytest.raises(UnsupportedSetting, match=r"^resume_adapters in axolotl's YAML: .*keep_lst"):
        plugin.add_callbacks_pre_trainer({"resume_adapters": {"keep_lst": 1}}, None)


def test_without_axolotl_the_import_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "axolotl", None)
    with pytest.raises(MissingFramework, match="axolotl, which is not installed"):
        importlib.import_module("resume_adapters.axolotl")

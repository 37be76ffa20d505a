"""The private names of Accelerate and torchdata that the adapter uses: a clear failure where a release changes them."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderAdapter, DataLoaderDispatcher, DataLoaderShard
from accelerate.utils import DistributedType
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchdata.stateful_dataloader import StatefulDataLoader

import resume_adapters.accelerate
from resume_adapters.accelerate.strategies import choose_strategy, require_supported
from resume_adapters.core.dataloader.tracked import track
from resume_adapters.errors import UnsupportedSetting

import contract


def test_an_older_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    contract.older_framework_is_refused(resume_adapters.accelerate, accelerate, monkeypatch)


@pytest.mark.parametrize(("kind", "name"), [("FSDP", "FSDP2"), ("DEEPSPEED", "DeepSpeed")])
def test_an_older_version_is_refused_where_the_state_is_spread(
    kind: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spread: Any = SimpleNamespace(
        distributed_type=DistributedType[kind], is_fsdp2=True, _models=[torch.nn.Linear(1, 1)]
    )
    monkeypatch.setattr(accelerate, "__version__", "1.8.1")
    with pytest.raises(UnsupportedSetting, match=f"with accelerate 1.8.1 a run under {name} .* needs 1.9 or newer"):
        choose_strategy(spread, tmp_path)


def test_processes_that_accelerate_does_not_know_are_refused() -> None:
    """Each would take itself for the main process, and two would write one file."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(UnsupportedSetting, match=r"counts 1 processes where torch\.distributed has 2"):
            require_supported(Accelerator(cpu=False))
    finally:
        torch.distributed.destroy_process_group()


def test_a_loader_that_has_nothing_left_gives_no_batch() -> None:
    """Before 1.9 it gave None, and then failed."""
    loader = Accelerator(cpu=True).prepare(torch.utils.data.DataLoader([torch.zeros(1)] * 3))
    assert len(list(loader)) == 3 and loader.iteration == 1
    track(loader.base_dataloader).hold()
    assert list(loader) == [] and len(list(loader)) == 3
    assert loader.gradient_state.active_dataloader is None


def test_an_accelerator_keeps_what_it_prepared() -> None:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    loader = torch.utils.data.DataLoader([torch.zeros(1)])
    prepared = accelerator.prepare(model, optimizer, schedule, loader)
    seen: Any = accelerator
    assert seen._models == [model]
    assert (seen._optimizers, seen._schedulers, seen._dataloaders) == ([prepared[1]], [prepared[2]], [prepared[3]])
    assert prepared[1].optimizer is optimizer
    assert seen._custom_objects == [] and dict(seen._load_model_state_pre_hook) == {}
    assert isinstance(prepared[3].base_dataloader, torch.utils.data.DataLoader)
    assert prepared[3].iteration == 0


def test_the_loaders_are_made_and_cut_as_they_were() -> None:
    parameters = list(inspect.signature(DataLoaderAdapter.__init__).parameters)
    assert parameters[:4] == ["self", "dataset", "use_stateful_dataloader", "batch_sampler"]
    source = inspect.getsource(DataLoaderDispatcher.__iter__)
    assert source.index("first_batch = self.slice_fn(") < source.index("batch = self.slice_fn(")
    assert "not self._drop_last and first_batch is None" in source
    assert "self.iteration += 1" in inspect.getsource(DataLoaderShard.__iter__)


def test_a_stateful_loader_keeps_the_iterator_that_its_state_was_asked_of() -> None:
    loader: Any = StatefulDataLoader([torch.zeros(1)])
    assert loader._initial_iter_for_state_dict is False
    loader.state_dict()
    assert loader._initial_iter_for_state_dict is True and loader._iterator is not None

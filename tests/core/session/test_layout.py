"""Over which ranks a training is spread: a dimension that is not known to be exact is refused by its name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from resume_adapters.core.session.layout import UNNAMED, Layout, spread_over
from resume_adapters.errors import UnsupportedSetting

DATA = ("dp_replicate", "dp_shard")


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """A process group whose other members answer nothing."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    torch.distributed.destroy_process_group()


def split(names: tuple[str, ...] | None) -> torch.nn.Module:
    """Return a model of which one layer is split over two of four ranks."""
    mesh = init_device_mesh("cpu", (2, 2) if names else (4,), mesh_dim_names=names)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
    parallelize_module(model, mesh["tp"] if names else mesh, {"0": ColwiseParallel()})
    return model


@pytest.mark.usefixtures("four_ranks")
def test_the_meshes_of_the_weights_say_over_what_they_are_spread() -> None:
    assert spread_over([split(("dp_shard", "tp")), torch.nn.Linear(1, 1)]) == {"tp": 2}
    assert spread_over([split(None)]) == {UNNAMED: 4}
    assert spread_over([torch.nn.Linear(1, 1)]) == {}


def test_a_dimension_that_is_not_known_is_refused_by_its_name() -> None:
    with pytest.raises(UnsupportedSetting, match=r"2 ranks in `tp` and 2 ranks in `cp`.* knows dp_replicate, dp_shard"):
        Layout({"dp_shard": 2, "tp": 2, "cp": 2, "sp": 1}, DATA)
    with pytest.raises(UnsupportedSetting, match=rf"2 ranks in `{UNNAMED}`.* knows none"):
        Layout({UNNAMED: 2})
    assert Layout({"dp_replicate": 2, "dp_shard": 2, "tp": 1}, DATA).sharing == 1


def test_samples_count_by_the_ranks_that_read_batches_of_their_own() -> None:
    assert Layout({"data_parallel": 2, "tensor_parallel": 3}, ["data_parallel"], ["tensor_parallel"]).sharing == 3

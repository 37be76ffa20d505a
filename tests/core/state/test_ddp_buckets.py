"""The gradient buckets of DDP are rebuilt in the order of the run that was left; one process has buckets too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from resume_adapters.core.state import rng
from resume_adapters.core.state.comparison import first_difference
from resume_adapters.core.state.ddp_buckets import BucketOrder
from resume_adapters.errors import StateMismatch


@pytest.fixture
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model() -> torch.nn.Module:
    torch.manual_seed(1)
    made = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    made[0].bias.requires_grad_(False)
    return made


@pytest.mark.usefixtures("_group")
def test_a_replayed_order_is_the_recorded_one_and_leaves_no_trace() -> None:
    first = DistributedDataParallel(model())
    assert BucketOrder.applies(first) and not BucketOrder.applies(model())
    assert not BucketOrder.applies(DistributedDataParallel(model(), find_unused_parameters=True))
    recorded = BucketOrder(first)
    recorded.observe()
    for _ in range(2):
        first(torch.ones(1, 3)).sum().backward()
    assert sorted(recorded.order) == ["0.weight", "2.bias", "2.weight"], "what is frozen has no gradient"
    assert not recorded._handles

    resumed = DistributedDataParallel(model())
    before, weights = rng.capture(), {name: value.clone() for name, value in resumed.state_dict().items()}
    replayed = BucketOrder(resumed)
    replayed.replay(recorded.order)
    assert replayed.order == recorded.order
    assert all(parameter.grad is None for parameter in resumed.parameters())
    assert first_difference([before, weights], [rng.capture(), dict(resumed.state_dict())]) is None
    resumed(torch.ones(1, 3)).sum().backward()
    first.zero_grad()
    first(torch.ones(1, 3)).sum().backward()
    pairs = zip(first.parameters(), resumed.parameters(), strict=True)
    assert all(one.grad is None or torch.equal(one.grad, other.grad) for one, other in pairs)


@pytest.mark.usefixtures("_group")
def test_of_a_gradient_that_comes_several_times_the_first_counts() -> None:
    """A backward of a part of the model, within an accumulation, comes before that of the whole."""
    accumulating = DistributedDataParallel(model())
    recorded = BucketOrder(accumulating)
    recorded.observe()
    with accumulating.no_sync():
        for _ in range(2):
            accumulating.module[2].bias.sum().backward()
    assert recorded.order == ["2.bias"] and recorded._handles
    accumulating(torch.ones(1, 3)).sum().backward()
    assert recorded.order[0] == "2.bias" and sorted(recorded.order) == ["0.weight", "2.bias", "2.weight"]


@pytest.mark.usefixtures("_group")
def test_the_order_of_another_model_is_refused() -> None:
    with pytest.raises(StateMismatch, match=r"the saved gradient order and the model differ in 0\.weight, 5\.bias"):
        BucketOrder(DistributedDataParallel(model())).replay(["2.weight", "2.bias", "5.bias"])

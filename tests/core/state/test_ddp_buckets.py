"""The gradient buckets of DDP are rebuilt in the order of the run that was left; one process has buckets too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

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
    replayed.replay(recorded.order, 2)
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
        BucketOrder(DistributedDataParallel(model())).replay(["2.weight", "2.bias", "5.bias"], 1)


class Sharing(torch.nn.Module):
    """Two blocks that are checkpointed and share a layer, or a layer that is not used."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.shared = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.kind == "several times":
            for _ in range(2):
                x = checkpoint(self.shared, x, use_reentrant=True)
        elif self.kind == "once":
            x = self.shared(x)
        return x


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("kind", ["once", "several times", "not at all"])
def test_of_a_static_graph_an_order_is_known_where_each_gradient_comes_once(kind: str) -> None:
    module = DistributedDataParallel(Sharing(kind), static_graph=True)
    recorded = BucketOrder(module)
    recorded.observe()
    recorded.conclude()
    for _ in range(2):
        module(torch.ones(1, 3)).sum().backward()
    recorded.conclude()
    assert (len(recorded.order), bool(recorded.problem)) == ((4, False) if kind == "once" else (0, True))
    assert not recorded._handles


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("step", [1, 2])
def test_a_static_graph_goes_on_from_what_is_replayed(step: int) -> None:
    resumed = DistributedDataParallel(Sharing("once"), static_graph=True)
    reduced: list[int] = []

    def reduce(_: Any, bucket: Any) -> Any:
        reduced.append(bucket.index())
        done: Any = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    reduce.__annotations__.clear()  # torch compares them, where there are any
    resumed.register_comm_hook(None, reduce)
    names = [name.removeprefix("module.") for name, _ in resumed.named_parameters()]
    for _ in range(2):  # the second time it has been trained in this process
        BucketOrder(resumed).replay(names[::-1], step)
        for _ in range(3):
            reduced.clear()
            resumed(torch.ones(1, 3)).sum().backward()
            assert reduced, "the gradients of no step are left as they are"

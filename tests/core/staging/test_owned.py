"""Only what nothing but an optimizer of torch changes, between two calls of its hooks, is copied later."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from resume_adapters.core.staging.owned import owned_storages


class Wrapper:
    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer


class Unhooked(torch.optim.SGD):
    """It is not made as torch makes its optimizers, so torch does not call its hooks."""

    def __init__(self, parameters: list[Any]) -> None:
        self.param_groups = [{"params": parameters}]
        self.state: Any = {}

    def step(self, closure: Any = None) -> None:
        """Change the weights."""


@pytest.fixture
def model() -> torch.nn.Linear:
    return torch.nn.Linear(200, 200)


def names(*optimizers: Any, restless: tuple[str, ...] = (), followers: dict[str, Any] | None = None) -> list[str]:
    found = owned_storages(optimizers, followers or {}, restless, may_wait=True)
    return [each.name for each in found.values() if each.may_wait]


def test_parameters_and_moments_are_the_optimizers(model: torch.nn.Linear) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(200)).sum().backward()
    optimizer.step()
    owned = ["parameter 0 of AdamW", "exp_avg of parameter 0 of AdamW", "exp_avg_sq of parameter 0 of AdamW"]
    assert names(optimizer) == names(Wrapper(Wrapper(optimizer))) == owned, "the bias and the steps are too small"
    assert names(optimizer, restless=("exp_avg of parameter 0 of AdamW",)) == [owned[0], owned[2]]


def test_what_follows_an_optimizer_is_copied_later_if_torch_calls_its_hooks(model: torch.nn.Linear) -> None:
    followers = {"weights": torch.ones(200, 200), "small": torch.ones(2), "restless": torch.ones(200, 200)}
    owned = names(torch.optim.SGD(model.parameters()), followers=followers, restless=("restless",))
    assert owned == ["weights", "parameter 0 of SGD"]
    assert names(Unhooked(list(model.parameters())), followers=followers) == []


def test_a_parameter_that_its_group_does_not_hold_at_the_moment(model: torch.nn.Linear) -> None:
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(200)).sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["params"] = []
    optimizer.state["of all"] = 1
    assert names(optimizer) == ["parameter 0 of SGD", "momentum_buffer of parameter 0 of SGD"]


def test_others_may_change_weights_at_any_time(model: torch.nn.Linear) -> None:
    assert names(Unhooked(list(model.parameters())), object()) == []


def test_what_is_not_on_the_cpu_is_copied_at_once() -> None:
    assert names(torch.optim.SGD([torch.nn.Parameter(torch.empty(200, 200, device="meta"))])) == []


@pytest.fixture
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_group")
def test_of_what_is_sharded_the_shard_is_the_optimizer_s(model: torch.nn.Linear) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(200)).sum().backward()
    optimizer.step()
    found = owned_storages([optimizer], {}, (), may_wait=True)
    assert [each.name for each in found.values()] == ["parameter 0 of SGD", "momentum_buffer of parameter 0 of SGD"]
    weight: Any = model.weight
    owned = found[weight.to_local().data_ptr()]
    owned.sample()
    with torch.no_grad():
        weight.add_(1)
    assert not owned.is_as_sampled()

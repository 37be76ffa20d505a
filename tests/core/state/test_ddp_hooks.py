"""What a communication hook of DDP keeps is found, captured and restored; one process compresses gradients too."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from resume_adapters.core.observed.walk import Subjects
from resume_adapters.core.observed.when import ObservedState
from resume_adapters.core.state.ddp_buckets import BucketOrder, hook_states


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def compressing() -> Any:
    torch.manual_seed(1)
    ddp = DistributedDataParallel(torch.nn.Linear(8, 8))
    ddp.register_comm_hook(PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook)
    return ddp


def train(ddp: Any, steps: range) -> list[torch.Tensor]:
    gradients = []
    for step in steps:
        ddp.zero_grad()
        ddp(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        gradients.append(ddp.module.weight.grad.clone())
    return gradients


def observing(ddp: Any) -> ObservedState:
    return ObservedState(lambda: Subjects(hook_states([ddp])), "register")


def test_the_errors_that_power_sgd_feeds_back_go_on() -> None:
    first = compressing()
    order, observed = BucketOrder(first), observing(first)
    order.observe()
    observed.begin()
    train(first, range(5))
    observed.before_save()
    saved, said = copy.deepcopy(observed.capture()), str(observed.describe())
    assert "communication hook.error_dict" in said and "communication hook.rng" in said and "missing" not in said
    resumed = compressing()
    BucketOrder(resumed).replay(order.order, 5)
    again = observing(resumed)
    again.load(saved, {})
    again.begin()
    expected = train(first, range(5, 9))
    for gradient, other in zip(train(resumed, range(5, 9)), expected, strict=True):
        assert torch.equal(gradient, other)


def test_hooks_without_state_and_other_modules_have_none() -> None:
    ddp = DistributedDataParallel(torch.nn.Linear(1, 1))
    ddp.register_comm_hook(None, fp16_compress_hook)
    assert hook_states([ddp, torch.nn.Linear(1, 1), None]) == {}
    assert list(hook_states([compressing(), compressing()])) == ["communication hook", "communication hook 1"]

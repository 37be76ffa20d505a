"""What is loaded is a copy of what was saved, and optimizers of torch hold it as it was."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from resume_adapters.core.checkpoint.native_files import read_native
from resume_adapters.core.state.comparison import first_difference
from resume_adapters.core.state.loading import copied, load_verified, loading
from resume_adapters.errors import NotRestored


class Halving(torch.optim.SGD):
    """Changes in place what it has loaded."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["momentum_buffer"].mul_(0.5)


class Uncopied(TwoTensor):
    """As quantized moments: torch cannot clone it."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            raise NotImplementedError
        return super().__torch_dispatch__(func, types, args, kwargs)

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return Uncopied(inner["a"], inner["b"])


def test_a_tensor_that_torch_cannot_copy_is_copied() -> None:
    state = {"state": {0: [Uncopied(torch.ones(2), torch.zeros(2))]}, "lr": 0.1}
    with pytest.raises(NotImplementedError):
        copy.deepcopy(state)
    found = copied(state)
    assert first_difference(state, found) is None
    found["state"][0][0].a.zero_()
    assert first_difference(state, found) is not None


def test_what_shares_memory_shares_it_in_a_copy_too() -> None:
    bank, alone = torch.ones(200, 200), torch.arange(40000.0).reshape(200, 200).t()
    state = {"bank": bank, "row": bank[3], "queue": deque([bank[5:7]]), "alone": alone, "again": [alone]}
    found = copied(state)
    found["bank"].zero_()
    found["alone"][0, 1] = 5
    assert found["row"].sum() == found["queue"][0].sum() == 0 and found["again"][0] is found["alone"]
    assert found["alone"].stride() == alone.stride() and (found["alone"][1:] == alone[1:]).all()
    assert bank.sum() == 40000 and alone[0, 1] == 200


def test_what_trains_neither_lies_in_the_file_nor_proves_itself(tmp_path: Path) -> None:
    def trained(kind: type[torch.optim.SGD]) -> torch.optim.SGD:
        weight = torch.ones(3, requires_grad=True)
        optimizer = kind([weight], lr=0.1, momentum=0.9)
        weight.sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return optimizer

    torch.save(trained(torch.optim.SGD).state_dict(), tmp_path / "optimizer.pt")
    saved, live = read_native(tmp_path / "optimizer.pt"), trained(torch.optim.SGD)
    load_verified("optimizer", live, saved)
    for moments in (next(iter(live.state.values()))["momentum_buffer"], saved["state"][0]["momentum_buffer"]):
        assert moments.tolist() == [1.0, 1.0, 1.0]
        moments.zero_()
    with pytest.raises(NotRestored, match="optimizer was loaded, but its state is not the saved one"):
        load_verified("optimizer", trained(Halving), read_native(tmp_path / "optimizer.pt"))


class Wide(torch.optim.Optimizer):
    """Keeps more of each weight than the dtype of the weight can hold."""

    def __init__(self, weights: Any) -> None:
        super().__init__(weights, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for weight in self.param_groups[0]["params"]:
            self.state[weight] = {
                "moments": torch.full((2,), 1 / 3),
                "rows": [torch.full((1,), 1 / 7), 2],
                "pair": (torch.full((1,), 1 / 9, dtype=torch.float64),),
                "nested": {"way": "slow", "sums": torch.full((1,), 1 / 11)},
                "plain": torch.ones(2, dtype=torch.bfloat16),
                "count": 3,
            }


class Counting(torch.optim.Adam):
    """Counts in integers, as Adam did once; what it inherits makes tensors of them."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for weight in self.param_groups[0]["params"]:
            self.state[weight] = {"step": 5, "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}


def trained(kind: Callable[[Any], Any], dtype: torch.dtype) -> Any:
    weight = torch.nn.Parameter(torch.ones(2, dtype=dtype))
    weight.grad = torch.ones_like(weight)
    optimizer = kind([weight])
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("kind", "dtype"), [(Wide, torch.bfloat16), (torch.optim.NAdam, torch.bfloat16), (Counting, torch.float32)]
)
def test_optimizers_hold_what_was_saved_as_it_was(kind: Any, dtype: torch.dtype) -> None:
    saved, live = trained(kind, dtype).state_dict(), kind([torch.nn.Parameter(torch.zeros(2, dtype=dtype))])
    live.load_state_dict(copied(saved))
    assert first_difference(saved, live.state_dict()) is not None, "torch converts it by itself"
    with loading():
        live.load_state_dict(copied(saved))
    assert first_difference(saved, live.state_dict()) is None
    load_verified("optimizer", kind([torch.nn.Parameter(torch.zeros(2, dtype=dtype))]), saved)


class Halved(Wide):
    """Saves less than it holds."""

    def state_dict(self) -> Any:
        found = copy.deepcopy(super().state_dict())
        found["state"][0]["moments"] = found["state"][0]["moments"].half()
        return found


def hooked(weights: Any) -> Wide:
    made = Wide(weights)
    made.register_state_dict_post_hook(lambda *_: None)
    return made


def prepared(weights: Any) -> Wide:
    made = Wide(weights)
    made.register_load_state_dict_pre_hook(lambda *_: None)
    return made


@pytest.mark.parametrize(("kind", "is_foreign"), [(Halved, False), (hooked, False), (prepared, False), (Wide, True)])
def test_what_may_be_another_form_of_the_state_is_converted_as_ever(kind: Any, is_foreign: bool) -> None:
    saved, live = trained(kind, torch.bfloat16).state_dict(), trained(kind, torch.bfloat16)
    with loading(is_foreign=is_foreign):
        live.load_state_dict(copied(saved))
    (state,) = live.state.values()
    assert state["moments"].dtype == torch.bfloat16


class Hollow(torch.optim.Optimizer):
    """Asks another for its groups."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.inner.param_groups

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)


def test_one_within_another_is_loaded_as_it_was_too() -> None:
    saved, live = trained(Wide, torch.bfloat16).state_dict(), Hollow(trained(Wide, torch.bfloat16))
    with loading():
        live.load_state_dict(copied(saved))
    assert first_difference(saved, live.inner.state_dict()) is None

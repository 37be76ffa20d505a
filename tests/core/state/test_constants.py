"""What training does not change is what it was: restored where it is small, else compared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from resume_adapters.core.state.constants import Constants, is_captured, left_out
from resume_adapters.errors import NotRestored

CHECKPOINT = Path("checkpoint-5")


class Model(torch.nn.Module):
    def __init__(self, seed: int, width: int = 4) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.head, self.trained = torch.nn.Linear(4, width), torch.nn.Linear(4, 4)
        self.head.requires_grad_(False)
        self.register_buffer("table", torch.randn(4), persistent=False)
        self.register_buffer("saved", torch.randn(4))
        self.averaged = torch.nn.Linear(2, 2).requires_grad_(False)


def begun(model: torch.nn.Module, saved: Any = None) -> Constants:
    constants = Constants()
    constants.begin([model], saved, None if saved is None else CHECKPOINT)
    return constants


def test_what_is_small_is_restored_into_the_tensors_that_are_there() -> None:
    first, second = Model(1), Model(2)
    saved = begun(first).capture([first])
    assert is_captured(saved)
    assert sorted(saved["digests"]) == ["averaged.bias", "averaged.weight", "head.bias", "head.weight", "table"]
    head = second.head.weight
    begun(second, saved)
    assert second.head.weight is head and torch.equal(head, first.head.weight)
    assert torch.equal(second.table, first.table) and not torch.equal(second.trained.weight, first.trained.weight)


def test_what_a_check_before_the_first_step_has_filled_gets_its_shape_again() -> None:
    """A resume may leave the check out, as Lightning does."""
    first, second = Model(1), Model(1)
    first.table = torch.ones(9)
    held = second.table
    begun(second, begun(first).capture([first]))
    assert second.table is held and held.tolist() == [1] * 9


def test_what_is_large_is_refused_by_name() -> None:
    first, second = Model(1, 1 << 17), Model(2, 1 << 17)
    saved = begun(first).capture([first])
    assert "head.weight" not in saved["tensors"]
    with pytest.raises(NotRestored, match=r"1 tensors .*head\.weight first.* modules_to_save"):
        begun(second, saved)
    begun(Model(1, 1 << 17), saved)


@pytest.mark.parametrize("counted", [True, False])
def test_what_changes_after_all_is_left_to_others(counted: bool) -> None:
    first = Model(1)
    constants = begun(first)
    (first.averaged.weight if counted else first.averaged.weight.data).mul_(0.5)  # as averages are written
    assert "averaged.weight" not in constants.capture([first])["digests"]
    first.head.requires_grad_(True)
    first.table = torch.ones(4)
    assert [*constants.capture([first])["digests"]] == ["averaged.bias"]
    begun(Model(1), constants.capture([first]))


def test_a_resumed_run_hands_on_what_it_was_given() -> None:
    first = Model(1)
    constants = begun(first)
    first.averaged.weight.mul_(0.5)
    saved = constants.capture([first])
    second = Model(1)
    resumed = begun(second, saved)
    assert resumed.capture([second]).keys() == saved.keys()
    assert resumed.capture([second])["digests"] == saved["digests"]


def test_tensors_that_have_no_bytes_of_their_own_are_passed_over() -> None:
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lazy = torch.nn.parameter.UninitializedParameter(requires_grad=False)
            self.absent = torch.nn.Parameter(torch.empty(2, device="meta"), requires_grad=False)
            self.register_buffer("nothing", torch.empty(0), persistent=False)

    assert begun(Odd()).capture([Odd()]) == {"digests": {}, "tensors": {}}


def test_a_trained_parameter_that_a_hook_takes_out_of_the_state_dict_is_found() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    assert left_out([model]) == []
    model.register_parameter("hidden", torch.nn.Parameter(torch.ones(2)))
    model.register_state_dict_post_hook(lambda _module, state, *_: state.__delitem__("hidden"))
    assert [each is model.hidden for each in left_out([model])] == [True]


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        (lambda each: each.half(), ["weight", "bias", "mean"]),
        (lambda each: each + 1, ["weight", "bias", "mean"]),
        (lambda each: {"within": each}, ["weight", "bias", "mean"]),
        (lambda each: each.clone(), []),
        (lambda each: each[:1], []),  # a shard, or the whole of one
    ],
    ids=["half", "others", "no tensors", "copies", "shards"],
)
def test_what_a_state_dict_has_otherwise_than_the_module_is_found(
    changes: Callable[[Any], Any], found: list[str]
) -> None:
    class Changes(torch.nn.Linear):
        def state_dict(self, *arguments: Any, **options: Any) -> Any:
            return {name: changes(each) for name, each in super().state_dict(*arguments, **options).items()}

    model = Changes(2, 2)
    model.register_buffer("mean", torch.ones(2))
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert [name for name, each in held.items() if any(each is one for one in left_out([model]))] == found

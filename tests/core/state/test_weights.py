"""Weights against a checkpoint's: whole files, every key, every bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from resume_adapters.core.checkpoint.native_files import read_weight_files, require_intact
from resume_adapters.core.state.weights import (
    architecture,
    are_saved_as_they_are,
    have_names_of,
    load_weights,
    resize,
    resized,
    verify_digests,
    verify_weights,
    weight_digests,
)
from resume_adapters.errors import CheckpointDamaged, NotRestored, StateMismatch, UnsupportedSetting

import faults

CHECKPOINT = Path("checkpoint-10")

FORMATS: dict[str, Callable[[Any, Path], Any]] = {".safetensors": save_file, ".pt": torch.save}


@pytest.mark.parametrize("ending", FORMATS)
def test_a_file_is_read_and_a_torn_one_is_told(tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"weights{ending}"
    saved = {"weight": torch.arange(5000.0)}
    FORMATS[ending](saved, file)
    require_intact(file)
    assert torch.equal(read_weight_files([file])["weight"], saved["weight"])
    faults.cut(file)
    with pytest.raises(CheckpointDamaged, match=f"weights{ending} is torn"):
        require_intact(file)


def test_a_torn_member_is_named(tmp_path: Path) -> None:
    torch.save({"weight": torch.arange(5000.0)}, tmp_path / "weights.pt")
    faults.flip(tmp_path / "weights.pt")
    with pytest.raises(CheckpointDamaged, match=r"is torn at weights/data/0"):
        require_intact(tmp_path / "weights.pt")


def test_weights_that_do_not_fit_are_named() -> None:
    model = torch.nn.Linear(2, 2)
    saved = {"weight": torch.zeros(2, 2), **{f"layer.{index}": torch.zeros(1) for index in range(7)}}
    with pytest.raises(StateMismatch, match=r"missing bias; unexpected layer\.0, .*layer\.4 and 2 more\. Build"):
        load_weights(model, saved, CHECKPOINT)
    with pytest.raises(StateMismatch, match="the model: unexpected other"):
        load_weights(model, {**model.state_dict(), "other": torch.zeros(1)}, CHECKPOINT)


def test_of_tied_weights_one_is_enough() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].weight = model[0].weight
    saved = {name: torch.ones_like(value) for name, value in model.state_dict().items() if name != "1.weight"}
    load_weights(model, saved, CHECKPOINT)
    verify_weights(model, saved, CHECKPOINT)


def test_one_bit_of_a_weight_is_noticed() -> None:
    model = torch.nn.Linear(2, 2)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        model.weight[0, 0] += 1e-7
    with pytest.raises(NotRestored, match="model differs from checkpoint-10 after loading: weight: saved"):
        verify_weights(model, saved, CHECKPOINT)


class Counts(torch.nn.Linear):
    """Saves a count of any type beside its tensors, as torch documents it."""

    count: object = 0

    def get_extra_state(self) -> object:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, object]) -> None:
        self.count = state["count"]


def test_what_a_module_saves_beside_its_tensors_is_loaded_and_compared() -> None:
    model, other = Counts(2, 2), Counts(2, 2)
    before = architecture(model.state_dict())
    model.count = "many"
    saved = copy.deepcopy(model.state_dict())
    assert architecture(saved) == before
    assert weight_digests(saved).keys() == {"weight", "bias"}
    load_weights(other, saved, CHECKPOINT)
    verify_weights(other, saved, CHECKPOINT)
    assert other.count == "many" and are_saved_as_they_are(saved, other.state_dict())
    other.count = "more"
    with pytest.raises(NotRestored, match=r"_extra_state\.count: saved 'many'"):
        verify_weights(other, saved, CHECKPOINT)
    del saved["_extra_state"]
    with pytest.raises(StateMismatch, match="missing _extra_state"):
        load_weights(other, saved, CHECKPOINT)


def test_weights_under_other_names_or_in_another_order_are_not_saved_as_they_are() -> None:
    live = torch.nn.Linear(2, 2).state_dict()
    saved = {f"_orig_mod.{name}": value.clone() for name, value in live.items()}
    assert have_names_of(saved, live) and are_saved_as_they_are(saved, live)
    turned = {**saved, "_orig_mod.weight": saved["_orig_mod.weight"].flip(0)}
    assert have_names_of(turned, live) and not are_saved_as_they_are(turned, live)
    for other in ({"bias": saved["_orig_mod.bias"]}, {**saved, "_orig_mod.scale": torch.zeros(1)}):
        assert not have_names_of(other, live) and not are_saved_as_they_are(other, live)


def test_digests_are_of_the_bits_under_the_name_without_wrappers() -> None:
    model = torch.nn.Linear(2, 2)
    digests = weight_digests({f"_orig_mod.{name}": value for name, value in model.state_dict().items()})
    assert sorted(digests) == ["bias", "weight"]
    verify_digests(digests, model.state_dict(), CHECKPOINT)
    with torch.no_grad():
        model.weight[0, 0] += 1e-7
    with pytest.raises(NotRestored, match=r"1 of 2 tensors are not what they were when checkpoint-10 .*, weight first"):
        verify_digests(digests, model.state_dict(), CHECKPOINT)
    with pytest.raises(NotRestored, match=r"gone first"):
        verify_digests({"gone": ""}, model.state_dict(), CHECKPOINT)


def growing() -> Any:
    model: Any = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.LazyLinear(2))
    model.register_buffer("bank", torch.zeros(0, 2))
    return model


def test_tensors_whose_shape_training_changes_get_it_again() -> None:
    model, wrapped = growing(), torch.nn.ModuleDict({"module": growing()})
    start = architecture(model.state_dict())
    assert resized(start, start, [model]) == {}
    model.bank = torch.ones(3, 2)
    model[0].weight.data = torch.ones(4)
    model[1](torch.ones(5, 2))
    shapes = resized(start, architecture(model.state_dict()), [model])
    assert shapes == {"0.weight": [4], "1.weight": [2, 2], "1.bias": [2], "bank": [3, 2]}
    held = wrapped["module"][0].weight
    resize([wrapped], shapes)
    load_weights(wrapped, model.state_dict(), CHECKPOINT)
    assert architecture(wrapped.state_dict()) == architecture(model.state_dict()) and held.tolist() == [1] * 4


def test_tensors_that_training_makes_or_removes_are_named() -> None:
    model = growing()
    start = architecture(model.state_dict())
    model.bank = torch.zeros(3, 2, dtype=torch.float64)
    model.register_buffer("made", torch.zeros(1))
    del model[0].running_var
    with pytest.raises(UnsupportedSetting, match=r"3 of the model's tensors were made or removed") as error:
        resized(start, architecture(model.state_dict()), [model])
    assert "running_var: float32[2] before the first step, nothing now" in str(error.value)
    assert "made: nothing before the first step, float32[1] now" in str(error.value)
    assert "bank: float32[0, 2] before the first step, float64[3, 2] now" in str(error.value)


def test_a_tensor_whose_shape_is_not_known_yet_has_a_form() -> None:
    found = architecture(torch.nn.LazyLinear(2).state_dict())
    assert found == {"weight": "float32[not known yet]", "bias": "float32[not known yet]"}


class Summing(torch.nn.Module):
    """A model whose ``state_dict()`` takes no options, with a buffer of which each rank has its own."""

    def __init__(self, count: float) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.register_buffer("count", torch.tensor(count))

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return super().state_dict()


def test_buffers_of_each_rank_are_left_out_of_a_comparison_that_asks_a_model_for_no_more_than_its_state() -> None:
    module = Summing(1.0)
    saved = {name: each.clone() for name, each in module.state_dict().items()}
    verify_weights(module, saved, Path("checkpoint-10"))
    module.count.fill_(2.0)  # type: ignore[operator]
    verify_weights(module, saved, Path("checkpoint-10"), {id(module.count)})
    with pytest.raises(NotRestored, match="count: saved"):
        verify_weights(module, saved, Path("checkpoint-10"))

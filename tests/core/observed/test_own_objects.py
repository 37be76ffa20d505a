"""Objects of a training in a checkpoint: found as it is saved, and given back in the next launch."""

from __future__ import annotations

import enum
import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from resume_adapters.core.observed import own_objects
from resume_adapters.core.state import safe_load
from resume_adapters.core.state.stand_ins import Opaque, stand_in, stand_ins, standing_in


class Mode(enum.Enum):
    FAST = 1
    SLOW = 2


class Scale:
    """An object of a library."""

    def __init__(self) -> None:
        self.factor = 2.0


class Holder:
    """What hangs on a training."""

    def __init__(self) -> None:
        self.itself = self
        self.numbers = torch.ones(2)
        self.scales = [{"target": Scale()}]
        self.loss = torch.nn.Sequential(torch.nn.ReLU())
        self.power = functools.partial(pow, 2)
        self.mode = Mode.FAST
        self.function = math.sqrt


def read(saved: Any) -> Any:
    """Return what a file of this content is read as."""
    if isinstance(saved, dict):
        return {key: read(value) for key, value in saved.items()}
    if isinstance(saved, list):
        return [read(value) for value in saved]
    return saved if isinstance(saved, int | str | torch.Tensor) else stand_in(f"library.{type(saved).__name__}")()


def content(held: Holder) -> dict[str, Any]:
    """Return what a hook of a library saves."""
    return {
        "epoch": 1,
        "weights": held.numbers,
        "scales": held.scales,
        "again": [held.scales[0]["target"]],
        "parts": {"loss": held.loss, "first": held.loss[0], "power": held.power},
        "mode": held.mode,
        "function": held.function,
    }


def test_each_object_is_given_back_where_it_was() -> None:
    former, held = Holder(), Holder()
    saved = own_objects.find(content(former), {"module": former})
    loaded = read(content(former))
    assert own_objects.give_back(loaded, saved, {"module": held}) == []
    assert loaded == {**content(held), "weights": former.numbers}
    assert loaded["parts"]["first"] is held.loss[0] and loaded["again"][0] is held.scales[0]["target"]


def test_what_is_not_of_the_training_is_not_found() -> None:
    held = Holder()
    endless: list[Any] = [Scale()]
    endless.append(endless)
    assert own_objects.find({"own": Scale(), "endless": endless, "step": 3}, {"module": held}) == {}


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("mode", Mode.SLOW, r"Mode.FAST at module.mode \(Mode.SLOW now\)"),
        ("function", math.cos, r"math.sqrt at module.function \(math.cos now\)"),
        ("power", functools.partial(pow, 3), r"partial .* at module.power \(partial .* now\)"),
        ("loss", None, r"Sequential at module.loss \(NoneType .*now\)"),
    ],
)
def test_another_object_than_was_saved_is_named(name: str, value: Any, words: str) -> None:
    former, held = Holder(), Holder()
    saved = own_objects.find({name: getattr(former, name)}, {"module": former})
    setattr(held, name, value)
    loaded = {name: Opaque()}
    (found,) = own_objects.give_back(loaded, saved, {"module": held})
    assert pytest.RaisesExc(ValueError, match=words).matches(ValueError(found))
    assert isinstance(loaded[name], Opaque)


def test_an_object_is_refused_where_it_is_not_given_back(tmp_path: Path) -> None:
    """One place of an object counts for that alone: in a tuple nothing can be put in its place."""
    scale, file = Scale(), tmp_path / "file.pt"
    content = {"own": scale, "fixed": (scale,), "within": [{"scale": scale}]}
    places = own_objects.find(content, {"scale": {"only": scale}})
    assert set(places) == {"own", "within.0.scale"}
    torch.save(content, file)
    with safe_load.data_only([]), standing_in():
        loaded = torch.load(file)
    found = stand_ins(loaded, lambda place: place not in places)
    assert list(found.values()) == ["fixed.0"]
    assert stand_ins(loaded, lambda place: place.partition(".")[0] not in content) == {}

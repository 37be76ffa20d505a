"""Looking never changes or ends a training: no code of the classes that are looked at is run."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from resume_adapters.core.observed import own_objects
from resume_adapters.core.observed.loaders import LoaderAttributes, content_of, rows_at_start
from resume_adapters.core.observed.variables import ScriptVariables
from resume_adapters.core.observed.walk import Subjects
from resume_adapters.core.observed.when import ObservedState

RUN: list[str] = []
"""Which methods of a hostile class were run."""

_METHODS = (
    *("__getattr__", "__getattribute__", "__setattr__", "__delattr__", "__eq__", "__ne__", "__lt__", "__hash__"),
    *("__len__", "__length_hint__", "__iter__", "__next__", "__reversed__", "__contains__", "__getitem__"),
    *("__setitem__", "__delitem__", "__bool__", "__int__", "__float__", "__index__", "__repr__", "__str__"),
    *("__format__", "__bytes__", "__dir__", "__sizeof__", "__reduce__", "__reduce_ex__", "__getstate__", "__copy__"),
    *("__deepcopy__", "__array__", "__buffer__", "__call__", "__torch_function__", "__array_finalize__"),
    *("keys", "values", "items", "get", "update", "copy", "parameters", "named_parameters", "buffers", "modules"),
    *("named_buffers", "named_modules", "children", "named_children", "numel", "close", "size", "tolist"),
)


def _raising(name: str) -> Any:
    def method(*_: Any, **__: Any) -> Any:
        RUN.append(f"{name} by {sys._getframe(1).f_code.co_name}")
        raise RuntimeError(f"{name} is nobody's business")

    return method


def hostile(base: type, *but: str) -> type:
    """Return a subclass whose methods and properties all raise, and say that they were run."""
    names: dict[str, Any] = {name: _raising(name) for name in _METHODS if name not in but}
    names |= {name: base.__hash__ for name in but if name == "__hash__"}
    if base is not object:
        names.pop("__array_finalize__", None)
    names |= {name: property(_raising(name)) for name in ("shape", "dtype", "size_in_bytes", "__class__", "grad_fn")}
    return type(f"Hostile{base.__name__.title()}", (base,), names)


def _module() -> Any:
    made = torch.nn.Linear(2, 2)
    made.own = [1]  # type: ignore[assignment]
    made.__class__ = hostile(torch.nn.Linear, "__setattr__", "__delattr__")
    return made


def _tensor() -> Any:
    return torch.zeros(3).as_subclass(hostile(torch.Tensor, "__hash__"))  # type: ignore[arg-type]


def _array() -> Any:
    return np.zeros(3).view(hostile(np.ndarray, "__array_finalize__"))


class Sequence(Dataset[Any]):
    """Has a length that cannot be asked for."""

    def __len__(self) -> int:
        raise RuntimeError("how long this is, is not known")

    def __getitem__(self, index: int) -> int:
        return index


@dataclass
class Record:
    value: int = 0

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        RUN.append("__dict__")
        return {}


KINDS: dict[str, Callable[[], Any]] = {
    "object": lambda: hostile(object)(),
    "dict": lambda: hostile(dict, "__setitem__")(a=1),
    "list": lambda: hostile(list)([1, 2]),
    "tuple": lambda: hostile(tuple)((1, 2)),
    "set": lambda: hostile(set)([1, 2]),
    "frozenset": lambda: hostile(frozenset)([1, 2]),
    "deque": lambda: hostile(deque)([1, 2]),
    "int": lambda: hostile(int)(3),
    "float": lambda: hostile(float)(3),
    "str": lambda: hostile(str)("3"),
    "bytes": lambda: hostile(bytes)(b"3"),
    "mapping": lambda: type("HostileMapping", (hostile(object), Mapping), {})(),
    "iterator": lambda: type("HostileIterator", (hostile(object), Iterator), {})(),
    "slots": lambda: type("HostileSlots", (), {"__slots__": ("a", "b"), "__getattribute__": _raising("slot")})(),
    "no slots": lambda: type("HostileNone", (), {"__slots__": (), "__repr__": _raising("__repr__")})(),
    "record": Record,
    "module": _module,
    "tensor": _tensor,
    "array": _array,
    "in a tuple": lambda: (hostile(object)(), hostile(list)([1])),
    "in a deque": lambda: deque([hostile(object)(), hostile(tuple)((1,))]),
    "in a set": lambda: {hostile(object, "__hash__")()},
    "lazy module": lambda: torch.nn.LazyLinear(2),
    "scripted module": lambda: torch.jit.script(torch.nn.Sequential(torch.nn.BatchNorm1d(2))),
    "of sequence": lambda: iter(type("Getting", (), {"__getitem__": _raising("item"), "__len__": _raising("len")})()),
}


@pytest.fixture(autouse=True)
def _nothing_is_run() -> Iterator[None]:
    RUN.clear()
    yield
    assert RUN == []


def changed(value: Any) -> None:
    """Change something of a value that can be changed, without running its methods."""
    for base in (list, deque, dict):
        if issubclass(type(value), base):
            {list: list.append, deque: deque.append, dict: dict.setdefault}[base](value, 7)


def made(kind: str) -> Any:
    value = KINDS[kind]()
    RUN.clear()
    return value


@pytest.mark.parametrize("kind", KINDS)
def test_a_callback_may_hold_what_nobody_may_touch(kind: str) -> None:
    def launched(saved: Any = None) -> tuple[Any, ObservedState]:
        callback = SimpleNamespace(held=made(kind), inner=SimpleNamespace(held=made(kind)), count=0, items=[made(kind)])
        model = torch.nn.Linear(2, 2)
        vars(model)["held"] = made(kind)
        RUN.clear()
        subjects = Subjects({"callback": callback, "model": model, "held": made(kind)}, captured=[model])
        state = ObservedState(lambda: subjects, "register")
        if saved:
            state.load(*saved)
        state.prepare()
        state.begin()
        return callback, state

    callback, state = launched()
    for count in (1, 2):
        callback.count = count
        changed(callback.held)
        callback.inner.held = made(kind)
        state.before_save()
        state.hold()
        state.release()
        found = state.capture()
    state.describe()
    assert "callback.count" in {str(each.path) for each in found}
    again, _ = launched((found, state.parts()["observed_tensors"].value if state.parts() else {}))
    assert again.count == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_dataset_may_hold_what_nobody_may_touch(kind: str) -> None:
    data: Any = Sequence()
    data.held, data.count, data.items, data.rows = made(kind), 0, [made(kind)], [1, 2, 3]
    collate: Any = SimpleNamespace(held=made(kind))
    roots = content_of(data, collate)
    attributes = LoaderAttributes(roots)
    data.count = 1
    changed(data.held)
    attributes.look()
    saved = attributes.capture()
    rows_at_start(roots)
    data.count = 5
    attributes.restore(saved)
    assert data.count == 1 or "dataset.count" in attributes.missing
    content_of(made(kind), made(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_a_script_may_hold_what_nobody_may_touch(kind: str) -> None:
    held, kept = made(kind), [0]
    loader = DataLoader(Sequence(), sampler=[])
    variables = ScriptVariables(lambda: [held, made(kind), loader])
    variables.begin([held, made(kind), loader])
    for _ in range(2):
        kept.append(1)
        changed(held)
        variables.compare()
    assert [each for each in variables.changed([]) if each.startswith("`kept`")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_may_hold_what_nobody_may_touch(kind: str) -> None:
    held = made(kind)
    found = own_objects.find({"held": held, "more": [made(kind)]}, {"trainer": SimpleNamespace(held=held)})
    assert set(found) <= {"held"}

"""The walk through the objects of a training: what it finds, what it passes over, what it restores."""

from __future__ import annotations

import array
import copy
import ctypes
import datetime
import decimal
import enum
import functools
import itertools
import logging
import mmap
import multiprocessing
import random
import signal
import threading
import time
import types
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from code_that_holds import HOLDING
from resume_adapters.core.observed import leaves, paths, walk
from resume_adapters.core.observed.leaves import LeafKind
from resume_adapters.core.observed.paths import ABSENT, Path, Step, type_name
from resume_adapters.core.observed.walk import Census, Subjects
from resume_adapters.core.state import constants, encoding
from resume_adapters.errors import NotSerialisable


class Thing:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Slotted:
    __slots__ = ("count", "empty")

    def __init__(self) -> None:
        self.count = 1


class OneSlot(Slotted):
    __slots__ = "more"


class AlsoOpen(OneSlot):
    __slots__ = ("__dict__",)


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Average:
    def __init__(self, fails: bool = False) -> None:
        self.shadow = torch.zeros(2)
        self.fails = fails

    def state_dict(self) -> dict[str, Any]:
        if self.fails:
            raise RuntimeError("not ready")
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]


def take(roots: dict[str, Any], **options: Any) -> Census:
    return walk.take(Subjects(roots, **options), lambda: 0.0)


def path(root: str, *steps: tuple[str, Any]) -> Path:
    return Path(root, tuple(Step(*step) for step in steps))


def restore(roots: Any, at: Path, saved: Any, kind: LeafKind = LeafKind.DATA, **options: Any) -> None:
    """Restore what was captured where nothing else has the memory, as of the type that is there."""
    options = {"stays": set(), "type_then": type_name(paths.get(roots, at)), **options}
    leaves.restore(roots, at, saved, kind, **options)


def changes(trainer: Any, change: Any, **options: Any) -> dict[str, LeafKind]:
    """Return what a census finds after a change, by path."""
    before = take({"trainer": trainer}, **options)
    change(trainer)
    return {str(at): leaf.kind for at, leaf in before.changed(take({"trainer": trainer}, **options)).items()}


def grown(value: Any) -> Any:
    """Return a changed copy of a value."""
    if isinstance(value, dict):
        return type(value)(value.default_factory, {"b": [2]}) if isinstance(value, defaultdict) else type(value)(b=2)
    if isinstance(value, deque | list):
        other = copy.copy(value)
        other.append(7)
        return other
    return value + value if not isinstance(value, set | frozenset) else value | {9}


DATA = [
    1, 1.5, "text", b"bytes", [1, [2.0]], (1, "a"), {1, 2}, frozenset((1,)), {"a": {"b": [None, True]}},
    deque([1, 2], maxlen=3), deque([1]), defaultdict(list, {"a": [1.0]}), defaultdict(None, {"a": 1}), Counter("aab"),
    OrderedDict(a=1), np.arange(3), np.float32(2), torch.arange(3), torch.ones(2, dtype=torch.bfloat16),
    {"train": defaultdict(list, {"loss": [torch.ones(1)]}), "eval": deque([np.ones(2)])},
]  # fmt: skip


@pytest.mark.parametrize("value", DATA, ids=repr)
def test_data_is_one_leaf_that_is_captured_encoded_and_restored_with_its_types(value: Any) -> None:
    trainer = Thing(value=value, same=copy.deepcopy(value))
    changed = grown(value)
    found = changes(trainer, lambda it: vars(it).update(value=copy.deepcopy(changed)))
    assert found == {"trainer.value": LeafKind.DATA}
    at = path("trainer", (".", "value"))
    captured = leaves.capture(changed, LeafKind.DATA)
    document, tensors = encoding.encode(captured)
    saved = encoding.decode(document, tensors)
    assert type(saved) is type(changed) and encoding.digest_of(encoding.exact(saved)) == encoding.digest_of(captured)
    fresh = Thing(value=copy.deepcopy(value))
    restore({"trainer": fresh}, at, saved, in_place=True)
    live = fresh.value
    assert type(live) is type(changed)
    assert encoding.digest_of(encoding.exact(live)) == encoding.digest_of(captured)
    if isinstance(live, deque):
        assert live.maxlen == changed.maxlen
    if isinstance(live, defaultdict):
        assert live.default_factory is changed.default_factory


def test_containers_are_restored_in_place_also_within_others() -> None:
    inner, items, seen, window = defaultdict(list, {"loss": [1]}), [[1], 5], {1}, deque([[1]], maxlen=3)
    trainer = Thing(metrics={"train": inner, "gone": 1}, items=items, seen=seen, window=window)
    first, held = items[0], window[0]
    saved = {"new": 2, "train": defaultdict(list, {"loss": [1, 2]})}
    roots = {"trainer": trainer}
    for name, value in (("metrics", saved), ("items", [[1, 2], 6, 7]), ("seen", {2}), ("window", deque([[3], [4]], 3))):
        restore(roots, path("trainer", (".", name)), value, in_place=False)
    assert inner == {"loss": [1, 2]} and trainer.metrics == {"new": 2, "train": inner}
    assert list(trainer.metrics) == ["new", "train"], "in the order in which they were saved"
    assert items == [[1, 2], 6, 7] and items[0] is first and seen == {2}
    assert window == deque([[3], [4]]) and window[0] is held
    restore(roots, path("trainer", (".", "window")), deque([1], maxlen=9), in_place=False)
    assert trainer.window is not window and trainer.window.maxlen == 9
    other = defaultdict(int, {"loss": 1})
    restore(roots, path("trainer", (".", "metrics"), ("[]", "train")), other, in_place=False)
    assert trainer.metrics["train"] is other


def test_a_defaultdict_of_what_no_checkpoint_names_is_filled_and_never_made() -> None:
    def made() -> Any:
        return Thing(logs={"rewards": defaultdict(lambda: deque(maxlen=2))}, none=None)

    trainer, fresh, at = made(), made(), path("trainer", (".", "logs"))
    trainer.logs["rewards"]["length"].append(1.5)
    document, tensors = encoding.encode(leaves.capture(trainer.logs, LeafKind.DATA))
    saved = encoding.decode(document, tensors)
    restore({"trainer": fresh}, at, saved, in_place=False)
    assert fresh.logs == trainer.logs and fresh.logs["rewards"]["new"].maxlen == 2
    known = Thing(logs={"rewards": defaultdict(list)})
    for roots, where in (({"trainer": fresh}, "none"), ({"trainer": known}, "logs")):
        with pytest.raises(NotSerialisable):
            restore(roots, path("trainer", (".", where)), [saved], in_place=False)
    with pytest.raises(NotSerialisable):
        restore({"trainer": known}, at, saved, in_place=False)


@pytest.mark.parametrize("made", [lambda: torch.zeros(3), lambda: np.zeros(3)], ids=["torch", "numpy"])
def test_an_array_is_filled_unless_training_replaces_it_and_others_need_what_is_there(made: Any) -> None:
    start, saved, smaller = made(), made() + 1, made()[:1]
    trainer, at = Thing(total=start), path("trainer", (".", "total"))
    needed = {leaves.memory_of(start)}
    restore({"trainer": trainer}, at, saved, in_place=False, stays=needed)
    assert trainer.total is saved and not start.any()
    trainer.total = start
    restore({"trainer": trainer}, at, smaller, in_place=True)
    assert trainer.total is smaller
    trainer.total = start
    restore({"trainer": trainer}, at, saved, in_place=True, stays=needed)
    assert trainer.total is start and start.all()
    restore({"trainer": trainer}, at, saved * 2, in_place=False)
    assert trainer.total is start and (start == 2).all()


def test_what_is_not_data_is_named_with_what_holds_it_and_not_with_what_is_below() -> None:
    trainer: Any = Thing(history=[Thing(a=1)], pair=(1, Thing()), iterator=None, colour=Colour.RED, none=Thing())
    trainer.full, trainer.still = (deque([Thing(a=1), Thing(a=2)], maxlen=2) for _ in range(2))

    def change(it: Any) -> None:
        it.history.append(Thing(a=1))
        it.history[0].a = 2
        it.pair = (2, it.pair[1])
        it.iterator, it.colour, it.none = iter([1]), Colour.BLUE, None
        it.made = Thing(a=1)
        it.full.append(Thing(a=3))

    assert changes(trainer, change) == {
        "trainer.history": LeafKind.OPAQUE,
        "trainer.pair[0]": LeafKind.OPAQUE,
        "trainer.iterator": LeafKind.OPAQUE,
        "trainer.colour": LeafKind.INSTANCE,
        "trainer.none": LeafKind.DATA,
        "trainer.made": LeafKind.OPAQUE,
        "trainer.full": LeafKind.OPAQUE,
    }


def test_what_is_kept_by_the_address_of_a_tensor_is_not_data() -> None:
    """Another process has others."""
    model = torch.nn.Linear(1, 1)
    trainer: Any = Thing(moments={}, nested={"moments": {id(model.weight): 0.0}}, steps={7: 0})

    def change(it: Any) -> None:
        it.moments[id(model.weight)] = torch.ones(1)
        it.nested["moments"][id(model.weight)] = 1.0
        it.steps[7] = 1

    assert changes(trainer, change, captured=[model]) == {
        "trainer.moments": LeafKind.OPAQUE,
        "trainer.nested['moments']": LeafKind.OPAQUE,
        "trainer.steps": LeafKind.DATA,
    }


class Window(deque[int]):
    """A container of the user's."""


class Seen(set[int]):
    """Another one."""


class Printing:
    __slots__ = ()

    def __repr__(self) -> str:
        raise RuntimeError("code of the user")


def counted() -> Any:
    yield from range(9)


def begun(iterator: Any) -> Any:
    next(iterator)
    return iterator


SHOWN: dict[str, tuple[Any, Any]] = {
    "deque of a class": (Window([1], maxlen=2), lambda it: it.append(2)),
    "set of a class": (Seen([1]), lambda it: it.add(2)),
    "array": (array.array("d", [1]), lambda it: it.append(2)),
    "empty array": (array.array("d"), lambda it: it.append(2)),
    "bytes": (bytearray(b"a"), lambda it: it.append(2)),
    "text": (np.array(["a", "b"]), lambda it: it.__setitem__(0, "c")),
    "objects": (np.array([None, "b"], dtype=object), lambda it: it.__setitem__(0, "c")),
    "masked": (np.ma.zeros(2), lambda it: it.__setitem__(0, 3)),
    "list": (iter([1, 2, 3]), next),
    "count": (itertools.count(), next),
    "cycle": (itertools.cycle([1, 2, 3]), next),
    "slice": (itertools.islice(itertools.count(), 9), next),
    "zip": (zip(range(9), [1, 2, 3], strict=False), next),
    "generator": (counted(), next),
    "generator that has begun": (begun(counted()), next),
    "generator over another": ((each for each in counted()), next),
    "loader": (iter(torch.utils.data.DataLoader(range(9))), next),  # type: ignore[arg-type]
    "loader with workers": (iter(torch.utils.data.DataLoader(range(9), num_workers=1)), next),  # type: ignore[arg-type]
}
"""What is no data, and how it changes."""


@pytest.mark.parametrize("name", SHOWN)
def test_what_is_not_data_is_named_as_soon_as_what_it_shows_of_itself_changes(name: str) -> None:
    value, change = SHOWN[name]
    trainer = Thing(value=value)
    assert changes(trainer, lambda it: None) == {}, "looking takes nothing from it"
    assert changes(trainer, lambda it: change(it.value)) == {"trainer.value": LeafKind.OPAQUE}


@pytest.mark.parametrize(
    "pair",
    [
        (decimal.Decimal(1), decimal.Decimal(2)), (1j, 2j), (range(1), range(2)),
        (datetime.date(2026, 1, 1), datetime.date(2026, 1, 2)), (np.datetime64("2026"), np.datetime64("2027")),
        (torch.zeros(2).to_sparse(), torch.ones(2).to_sparse()),
    ],
    ids=lambda pair: type(pair[0]).__name__,
)  # fmt: skip
def test_a_value_that_is_not_data_is_named_where_another_is_in_its_place(pair: Any) -> None:
    assert changes(Thing(value=pair[0]), lambda it: vars(it).update(value=pair[1])) == {
        "trainer.value": LeafKind.OPAQUE
    }


def test_an_object_that_shows_nothing_is_not_named_and_no_code_of_the_user_is_run() -> None:
    trainer = Thing(objects=(object(), Printing(), memoryview(b"abcd")[::2]))
    again = (object(), Printing(), memoryview(b"efgh")[::2])
    assert changes(trainer, lambda it: vars(it).update(objects=again)) == {}


def test_state_below_objects_lists_dicts_and_slots_is_found_three_objects_deep() -> None:
    levels = [type(f"Level{number}", (), {}) for number in range(3)]
    deep, three, four = (level() for level in levels)
    vars(deep).update(three=three, n=0), vars(three).update(four=four, n=0), vars(four).update(n=0)
    trainer = Thing(one=deep, objects=[Thing(n=0)], named={"a": Thing(n=0), Thing(): 1}, slots=AlsoOpen(), twice=deep)

    def change(it: Any) -> None:
        for each in (it.one, it.one.three, it.one.three.four, it.objects[0], it.named["a"]):
            each.n = 1
        it.slots.count = 2

    found = changes(trainer, change)
    assert set(found) == {
        *("trainer.one.n", "trainer.one.three.n", "trainer.objects[0].n", "trainer.named['a'].n"),
        "trainer.slots.count",
    }
    at = path("trainer", (".", "slots"), (".", "count"))
    restore({"trainer": trainer}, at, 5, in_place=False)
    assert trainer.slots.count == 5
    at = path("trainer", (".", "objects"), ("[]", 0), (".", "n"))
    restore({"trainer": trainer}, at, 5, in_place=False)
    assert trainer.objects[0].n == 5


def test_objects_that_wrap_each_other_are_on_one_level_and_others_within_them_three_levels_deep() -> None:
    class World:
        def __init__(self, inner: Any = None) -> None:
            self.inner, self.steps = inner, 0

    class Wrapper(World):
        pass

    world = World()
    agent = Thing(world=Wrapper(Wrapper(Wrapper(Wrapper(world)))), worlds=[Wrapper(World())])
    world.inner = Thing(n=0)

    def change(_: Any) -> None:
        world.steps = world.inner.n = 1
        agent.worlds[0].inner.steps = 1

    found = changes(Thing(agent=agent), change)
    of_world = "trainer.agent.world.inner.inner.inner.inner"
    assert set(found) == {f"{of_world}.steps", f"{of_world}.inner.n", "trainer.agent.worlds[0].inner.steps"}


def test_objects_that_hold_their_kind_in_a_dict_are_on_one_level_as_in_a_configuration() -> None:
    class Node:
        def __init__(self, **held: Any) -> None:
            self.held = held

    trainer = Thing(settings=Node(a=Node(b=Node(c=Node(rate=1)))))
    inner = trainer.settings.held["a"].held["b"].held["c"].held
    found = changes(trainer, lambda _: inner.update(rate=2))
    assert set(found) == {"trainer.settings.held['a'].held['b'].held['c'].held"}


def test_a_dict_of_a_class_of_its_own_is_restored_with_its_attributes() -> None:
    class Settings(dict[str, Any]):
        pass

    trainer = Thing(settings=Settings(rate=1))
    trainer.settings.rate = 1
    found = changes(trainer, lambda it: (it.settings.update(rate=2), setattr(it.settings, "rate", 2)))
    assert set(found) == {"trainer.settings['rate']", "trainer.settings.rate"}
    for kind in ("[]", "."):
        restore({"trainer": trainer}, path("trainer", (".", "settings"), (kind, "rate")), 3, in_place=False)
    assert trainer.settings == {"rate": 3} and trainer.settings.rate == 3


class Pair(NamedTuple):
    one: int
    other: Any


INSTANCES = [
    (Colour.RED, Colour.BLUE),
    (Pair(1, "a"), Pair(2, [0.5])),
    (Pair(1, torch.zeros(2)), Pair(2, torch.ones(3))),
    (torch.Size([1]), torch.Size([2, 3])),
]


@pytest.mark.parametrize("hold", [lambda value: value, lambda value: [value], lambda value: {"a": value}])
@pytest.mark.parametrize(("first", "later"), INSTANCES, ids=repr)
def test_a_member_of_an_enumeration_and_a_named_tuple_are_made_by_the_class_that_is_there(
    first: Any, later: Any, hold: Any
) -> None:
    def change(it: Any) -> None:
        it.value = hold(later)

    found = changes(Thing(value=hold(first)), change)
    assert {each for each in found.values() if each is not LeafKind.OPAQUE} == {LeafKind.INSTANCE}
    (where,) = (at for at, kind in found.items() if kind is LeafKind.INSTANCE)
    key = {"trainer.value[0]": [("[]", 0)], "trainer.value['a']": [("[]", "a")]}.get(where, [])
    document, tensors = encoding.encode(leaves.capture(later, LeafKind.INSTANCE))
    trainer = Thing(value=hold(first))
    at = path("trainer", (".", "value"), *key)
    restore({"trainer": trainer}, at, encoding.decode(document, tensors), LeafKind.INSTANCE, in_place=False)
    live = paths.get({"trainer": trainer}, at)
    assert type(live) is type(later) and repr(live) == repr(later)


def test_a_shape_is_made_where_none_was_and_no_class_of_the_script() -> None:
    at = path("a", (".", "v"))
    shape, colour = (take({"a": Thing(v=value)}).leaves[at] for value in (torch.Size([2]), Colour.RED))
    assert walk.is_captured(shape, "NoneType") and not walk.is_captured(colour, "NoneType")
    assert walk.is_captured(colour, "Colour") and not walk.is_captured(colour, "Shade")
    empty = Thing(v=None)
    restore({"a": empty}, at, (2, 3), LeafKind.INSTANCE, in_place=False, type_then="Size")
    assert empty.v == torch.Size([2, 3]) and type(empty.v) is torch.Size


def adding(number: int) -> Any:
    return lambda value: value + number


CODE = {
    "a function": (adding, test_a_shape_is_made_where_none_was_and_no_class_of_the_script),
    "one of a library": (torch.nn.functional.relu, torch.nn.functional.gelu),
    "one of C": (len, max),
    "a default": (lambda value, by=1: value, lambda value, by=2: value),
    "a part": (functools.partial(pow, 2), functools.partial(pow, 3)),
    "a named part": (functools.partial(int, base=2), functools.partial(int, base=8)),
    "a method": (INSTANCES[0][0].__hash__, INSTANCES[0][1].__hash__),
    "another method": (Average().state_dict, Average().load_state_dict),
    "a class": (Thing, Slotted),
    "a module": (torch.nn.ReLU(), torch.nn.GELU()),
}


@pytest.mark.parametrize(("first", "later"), CODE.values(), ids=CODE)
def test_code_that_training_has_chosen_is_named(first: Any, later: Any) -> None:
    def change(it: Any) -> None:
        it.value, it.late, it.made = later, later, later

    found = changes(Thing(value=first, late=None), change)
    assert found["trainer.value"] is LeafKind.CODE and "trainer.made" not in found
    assert ("trainer.late" in found) is not isinstance(later, torch.nn.Module), "it is made again after a resume"


@pytest.mark.parametrize("hold", [lambda code: code, lambda code: [code], lambda code: Thing(code=code)])
@pytest.mark.parametrize("kind", HOLDING)
def test_what_code_holds_is_captured_and_restored(kind: str, hold: Any) -> None:
    code, change = HOLDING[kind]()
    roots = {"trainer": Thing(value=hold(code))}
    before = take(roots)
    change()
    found = before.changed(take(roots))
    assert code(1) == 3 and {leaf.kind for leaf in found.values()} == {LeafKind.DATA}
    ((at, leaf),) = found.items()
    document, tensors = encoding.encode(leaves.capture(paths.get(roots, at), leaf.kind))
    another, _ = HOLDING[kind]()
    restore({"trainer": Thing(value=hold(another))}, at, encoding.decode(document, tensors), leaf.kind, in_place=False)
    assert another(1) == 3


def test_a_variable_that_others_capture_is_passed_over_in_each_function_that_has_it() -> None:
    code, change = HOLDING["a variable of an outer function"]()
    roots = {"trainer": Thing(value=code, change=change)}
    before = take(roots)
    change()
    captured = [*paths.within_code(roots, [at for at in before.changed(take(roots)) if at.steps[0].key == "value"])]
    found, left = take(roots).leaves, take(roots, captured=captured).leaves
    gone = {str(at) for at in found.keys() - left.keys()}
    assert gone == {"trainer.value.number", "trainer.change.number"}


@pytest.mark.parametrize("value", [ctypes.c_double(1), (ctypes.c_int * 2)(1, 2), multiprocessing.Value("d", 1.0)])
def test_the_numbers_of_ctypes_are_data_that_stays_where_it_is(value: Any) -> None:
    roots = {"trainer": types.SimpleNamespace(held=[value])}

    def change(number: int) -> None:
        if isinstance(value, ctypes.Array):
            value[1] = number
        else:
            value.value = number

    start = take(roots)
    change(5)
    ((at, leaf),) = start.changed(take(roots)).items()
    saved = copy.deepcopy(leaves.capture(paths.get(roots, at), leaf.kind))
    change(7)
    restore(roots, at, encoding.as_loaded(saved), leaf.kind, in_place=False)
    assert not take(roots).changed(take(roots))
    assert (value[1] if isinstance(value, ctypes.Array) else value.value) == 5


@pytest.mark.parametrize("kind", [ctypes.c_void_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_int), ctypes.c_void_p * 2])
def test_an_address_is_no_number_that_another_process_could_use(kind: Any) -> None:
    found = take({"trainer": types.SimpleNamespace(held=kind())}).leaves.values()
    assert {leaf.kind for leaf in found} == {LeafKind.OPAQUE}


SHARED = [
    torch.ones(2).share_memory_(), torch.ones(2).share_memory_().numpy()[1:], np.ndarray(1, np.int8, mmap.mmap(-1, 1)),
    np.frombuffer(multiprocessing.RawArray("d", 2)),
]  # fmt: skip
OWN = [
    torch.ones(2), torch.ones(2).numpy(), np.ones(2)[1:], np.frombuffer(bytes(8)), torch.eye(2).to_sparse(),
    torch.empty(2, device="meta"), torch.nn.UninitializedBuffer(), torch.eye(2).to_sparse_csr(),
]  # fmt: skip


@pytest.mark.parametrize(("array", "is_shared"), [*((each, True) for each in SHARED), *((each, False) for each in OWN)])
def test_memory_that_processes_share_is_known_whatever_tensor_has_it(array: Any, is_shared: bool) -> None:
    assert leaves.is_shared(array) == is_shared


def test_a_method_that_an_object_has_got_of_its_own_is_named() -> None:
    def change(it: Any) -> None:
        it.average.kind = dict
        it.model.forward = torch.relu

    found = changes(Thing(average=Thing(), model=torch.nn.Linear(1, 1)), change)
    assert found == {"trainer.model.forward": LeafKind.CODE}


def test_a_mode_is_that_of_what_holds_a_module_or_not() -> None:
    def made() -> Any:
        model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Dropout(), torch.nn.ReLU().eval()), torch.nn.ReLU())
        return Thing(model=model)

    def as_in_an_evaluation(it: Any) -> None:
        for each in it.model.modules():
            vars(each)["training"] = not each.training

    assert changes(made(), as_in_an_evaluation) == {}
    assert changes(made(), lambda it: it.model[1].eval()) == {"trainer.model.1.training": LeafKind.DATA}
    trainer = made()
    restore({"trainer": trainer}, path("trainer", (".", "model"), ("mode", "0")), False, in_place=False)
    assert [each.training for each in trainer.model.modules()] == [True, False, False, True, True]


def test_the_same_code_is_not_named() -> None:
    average = Average()
    made = [
        *(lambda: adding(1), lambda: functools.partial(int, base=2), lambda: average.state_dict, torch.nn.ReLU),
        lambda: Colour.RED,
    ]
    trainer = Thing(**{f"a{index}": each() for index, each in enumerate(made)})

    def change(it: Any) -> None:
        vars(it).update({f"a{index}": each() for index, each in enumerate(made)})

    assert changes(trainer, change) == {}


def test_a_module_that_becomes_one_of_another_class_is_not_named() -> None:
    model = torch.nn.Sequential(torch.nn.LazyLinear(2), torch.nn.Linear(2, 2))

    def change(it: Any) -> None:
        it(torch.zeros(1, 3))
        torch.nn.utils.parametrizations.weight_norm(it[1])

    assert LeafKind.CODE not in changes(model, change, captured=[model]).values()


def test_machinery_code_and_what_others_capture_is_passed_over() -> None:
    held = torch.zeros(2)
    captured = Thing(n=0)
    trainer = Thing(
        lock=threading.Lock(), log=logging.getLogger("x"), module=random, captured=captured,
        listed=[held], given=1, anywhere=Thing(noise=1), foreign=None, _warned_columns=set(),
    )  # fmt: skip

    def change(it: Any) -> None:
        it.lock, it.log, it.module = threading.Lock(), logging.getLogger("y"), enum
        it.captured.n = it.given = it.anywhere.noise = 5
        it.foreign = np.random.RandomState(0)
        it._warned_columns.add("text")
        held.add_(1)

    ignored = {"trainer.given": "the framework counts it", "*.noise": "nobody reads it"}
    options = {"captured": [captured, held], "ignored": ignored, "foreign": ("numpy.random",)}
    assert changes(trainer, change, **options) == {}


def test_a_stateful_object_and_a_generator_are_captured_through_their_state() -> None:
    average, generator = Average(), random.Random(1)
    trainer = Thing(average=average, generator=generator, broken=Average(fails=True))

    def change(it: Any) -> None:
        it.average.shadow = torch.ones(2)
        it.generator.random()

    assert changes(trainer, change) == {"trainer.average": LeafKind.STATEFUL, "trainer.generator": LeafKind.STATEFUL}
    saved = {name: leaves.capture(vars(trainer)[name], LeafKind.STATEFUL) for name in ("average", "generator")}
    expected, fresh = generator.random(), Thing(average=Average(), generator=random.Random(5))
    for name, state in saved.items():
        restore({"trainer": fresh}, path("trainer", (".", name)), state, LeafKind.STATEFUL, in_place=False)
    assert fresh.generator.random() == expected and fresh.average.shadow.all()
    for value in (trainer.broken, None):
        with pytest.raises(NotSerialisable):
            leaves.capture(value, LeafKind.STATEFUL)


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.register_parameter("none", None)
        self.register_module("nothing", None)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("kept", torch.zeros(2), persistent=False)
        self.register_buffer("empty", None)
        self.calls = 0


def test_of_the_trained_model_only_what_its_state_dict_lacks_is_found() -> None:
    model = Network()
    trainer = Thing(model=model, parameters=list(model.parameters()), reference=Network(), again=model)

    def census_of() -> Census:
        return take({"model": model, "trainer": trainer}, captured=[model])

    before = census_of()
    model.calls += 1
    for tensor in (model.layer.weight, model.mean, model.kept, trainer.reference.layer.bias):
        tensor.data.add_(1)
    model.layer.bias.requires_grad_(False)
    found = before.changed(census_of())
    assert {str(at): leaf.kind for at, leaf in found.items()} == {
        "model.calls": LeafKind.DATA,
        "model.kept": LeafKind.TENSOR,
        "model.layer.bias.requires_grad": LeafKind.DATA,
        "trainer.reference.layer.bias": LeafKind.TENSOR,
    }
    fresh = {"model": Network(), "trainer": Thing(reference=Network())}
    for at, leaf in found.items():
        live = paths.get({"model": model, "trainer": trainer}, at)
        held = paths.get(fresh, at)
        restore(fresh, at, leaves.capture(live, leaf.kind), leaf.kind, in_place=False)
        if leaf.kind is LeafKind.TENSOR:
            assert paths.get(fresh, at) is held and torch.equal(held, live)
    assert fresh["model"].calls == 1 and not fresh["model"].layer.bias.requires_grad


def test_of_a_wrapper_only_what_it_wraps_is_found() -> None:
    compiled: Any = torch.compile(Network())
    trainer = Thing(other=compiled)

    def change(it: Any) -> None:
        vars(it.other)["counter"] = it.other._orig_mod.calls = 3  # a compiled module passes its attributes on

    assert changes(trainer, change) == {"trainer.other._orig_mod.calls": LeafKind.DATA}


def test_what_does_not_fit_the_budget_is_left_out_and_not_taken_for_a_change() -> None:
    def trainer() -> Thing:
        return Thing(near=1, objects=[Thing(n=index) for index in range(50)], numbers=list(range(20_000)))

    roots = {"trainer": trainer()}
    whole, part = take(roots), walk.take(Subjects(roots), lambda: 0.0, objects=40)
    assert [*map(str, whole.left_out)] == ["trainer.numbers"], "the numbers are a data set"
    assert len(part.left_out) == 51 and part.leaves.keys() < whole.leaves.keys()
    assert part.changed(whole) == {}
    times = iter([0.0, 0.0, 1.0])
    cut = walk.take(Subjects(roots), lambda: next(times), seconds=0.5).left_out
    assert len(cut) == 2, "the objects and the numbers"


def test_a_process_that_is_held_up_sees_no_less() -> None:
    roots = {"trainer": Thing(objects=[Thing(n=Thing(n=index)) for index in range(1_000)])}
    held_up: list[bool] = []

    def hold_up(*_: Any) -> None:
        held_up.append(True)
        time.sleep(0.6)

    was = signal.signal(signal.SIGVTALRM, hold_up)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.002)  # within the walk
    try:
        census = walk.take(Subjects(roots))
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, was)
    assert held_up and census.left_out == []


def test_what_a_data_set_in_a_list_takes_of_the_budget_is_taken_from_nothing_else() -> None:
    roots = {"trainer": Thing(data=[{"x": [index]} for index in range(5_000)], near=Thing(inner=Thing(n=1)))}
    times = iter([0.0] * 4 + [1.0] * 9)
    census = walk.take(Subjects(roots), lambda: next(times))
    assert "trainer.near.inner.n" in map(str, census.leaves)
    assert [*map(str, census.left_out)] == ["trainer.data"]


def test_what_came_between_two_censuses_is_known_where_the_first_has_looked() -> None:
    roots = {"trainer": Thing(copies={"a": [torch.ones(1)]}, steps=[1], layer=torch.nn.Linear(1, 1, bias=False))}
    start = walk.take(Subjects(roots), lambda: 0.0)
    found = walk.made(Census(), start)
    assert {str(at) for at in found} == {"trainer.copies", "trainer.layer.weight"}
    assert walk.made(start, start) == set()
    for left_out, others in (("trainer", set()), ("trainer.layer", {"trainer.copies"})):
        before = Census(left_out=[path for path in start.entered if str(path) == left_out])
        assert {str(at) for at in walk.made(before, start)} == others


def test_a_path_that_leads_nowhere_finds_nothing() -> None:
    model = Network()
    roots = {"trainer": Thing(items=[1], named={"a": 1}, pair=(1,), slots=Slotted()), "model": model}
    nowhere = [
        path("nobody"), path("nobody", (".", "a")), path("trainer", (".", "a"), (".", "b")),
        path("trainer", (".", "items"), ("[]", 1)), path("trainer", (".", "items"), ("[]", "a")),
        path("trainer", (".", "named"), ("[]", "b")), path("trainer", ("tensor", "weight")),
        path("model", ("tensor", "weight")), path("model", ("requires_grad", "none")),
        path("trainer", (".", "slots"), (".", "empty")),
    ]  # fmt: skip
    assert [paths.get(roots, at) for at in nowhere] == [ABSENT] * len(nowhere)
    assert type_name(ABSENT) == "absent"
    assert str(path("model", (".", "layer"), ("requires_grad", "bias"))) == "model.layer.bias.requires_grad"


def test_a_module_that_training_makes_of_buffers_that_are_not_saved_is_found() -> None:
    model = torch.nn.Linear(2, 2)
    options: dict[str, Any] = {"captured": [model]}
    before = take({"model": model}, **options)
    model.made = torch.nn.Module()
    model.made.register_buffer("cache", torch.ones(2), persistent=False)
    now = take({"model": model}, **options, unsaved=constants.left_out([model]))
    assert [leaf.kind for leaf in before.changed(now).values()] == [LeafKind.MODULE]

"""What hangs on the objects of a training: its leaves by path, and which of them changed.

A walk begins at named roots and goes through attributes, dicts, lists and modules. The largest subtree of pure data is
one leaf, so that a ``defaultdict`` of lists is compared, captured and restored as a whole. Walking only reads what
objects hold, and runs no code of their classes; only objects that have ``state_dict()`` are asked for it.
"""

from __future__ import annotations

import enum
import functools
import time
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from resume_adapters.core.observed.leaves import (
    LeafKind,
    can_be_assigned,
    can_be_made,
    data_of_instance,
    is_array,
    is_instance,
    is_row,
    row_digest,
    state_of,
)
from resume_adapters.core.observed.paths import Path, Step, get, inside, is_module, submodules, tensors_of, type_name
from resume_adapters.core.state import encoding
from resume_adapters.core.state.fingerprint import value_digest
from resume_adapters.core.state.rng import is_generator
from resume_adapters.core.state.untouched import (
    HOLDING,
    attributes,
    cell_of,
    container,
    has_attributes,
    held_by_code,
    in_slots,
    is_a,
    items,
    numbers_in,
    size,
)
from resume_adapters.errors import NotSerialisable

DEPTH = 3
"""Objects that a path leads through at most."""

_SAMPLE = 1 << 20
"""Bytes that are read of a larger tensor."""

_SAMPLE_OF_MODULE = 1 << 14
"""Bytes that are read of a larger tensor of a module: there may be hundreds, and an update changes all of each."""

_LARGEST = 10_000
"""Values in one leaf at most: a data set in a list is not the state of a training."""

_MANY = 1_000
"""Values in a container that is looked at last: a data set in a list takes the time from nothing else."""


@dataclass(frozen=True)
class Leaf:
    """What was found at a path.

    Attributes:
        kind: how it can be captured.
        type: name of its type.
        fingerprint: equal in two walks if nothing has changed.
        arrays: refers to the tensors and arrays in it.
    """

    kind: LeafKind
    type: str
    fingerprint: Any
    arrays: tuple[weakref.ref[Any], ...] = field(default=(), compare=False)

    def keeps(self, before: Leaf | None) -> bool:
        """Return whether a tensor or an array of it was there before: training fills it, and does not replace it."""
        kept = {id(each()) for each in before.arrays} - {id(None)} if before else set()
        return any(id(each()) in kept for each in self.arrays)


@dataclass(frozen=True)
class Subjects:
    """What is walked.

    Attributes:
        roots: the objects where a walk begins, by the name under which a user knows them.
        captured: objects that others capture or that hold no state of the training; a walk does not enter them.
        unsaved: tensors of captured modules that nobody captures all the same.
        ignored: what is not looked at, each with the reason: a path such as ``"trainer.deepspeed"``, or ``"*.name"``
            for attributes of that name anywhere.
        foreign: prefixes of modules whose objects are not entered.
        trained: tensors that an optimizer updates. Where a walk finds one, training will change it, if not yet.
        stepped: those of them whose gradients are captured where one step leaves them for a later one.
        unnamed: why further objects of the training are not looked at, though nobody captures them.
        enters_data: datasets and samplers are looked at, too, and modules with parameters are not.
        largest: items in a container at most; one with more is left out.
        longest_row: items of one that is a row of numbers, at most.
        depth: objects that a path leads through at most.
    """

    roots: Mapping[str, Any]
    captured: Iterable[Any] = ()
    unsaved: Iterable[Any] = ()
    ignored: Mapping[str, str] = field(default_factory=dict)
    foreign: tuple[str, ...] = ()
    trained: Iterable[Any] = ()
    stepped: Iterable[Any] = ()
    unnamed: Sequence[str] = ()
    enters_data: bool = False
    largest: int = _LARGEST
    longest_row: int = 0
    depth: int = DEPTH

    def identities(self) -> set[int]:
        """Return the identities of what others capture; of a module, also of the tensors that its state dict holds."""
        return identities(self.captured) - {id(tensor) for tensor in self.unsaved}


@dataclass
class Census:
    """The leaves of one walk.

    Attributes:
        leaves: what was found, by path.
        entered: the paths of the objects whose content was looked at.
        left_out: the paths of what was not looked at: it is too large, or the budget was used up.
        hooks: how many hooks the modules have, by path.
    """

    leaves: dict[Path, Leaf] = field(default_factory=dict)
    entered: set[Path] = field(default_factory=set)
    left_out: list[Path] = field(default_factory=list)
    hooks: dict[Path, int] = field(default_factory=dict)

    def tells_of_hooks(self, now: Census, path: Path) -> bool:
        """Return whether a flag came to a module together with hooks, there or below: a new process makes both."""
        if path in self.leaves or now.leaves[path].type != "bool" or path.owner not in now.hooks:
            return False
        return any(each.is_below(path.owner) and now.hooks[each] > self.hooks.get(each, 0) for each in now.hooks)

    def changed(self, now: Census) -> dict[Path, Leaf]:
        """Return the leaves of a later census that differ, but not what is below one that cannot be captured."""
        found: dict[Path, Leaf] = {}
        opaque: list[Path] = []
        for path, leaf in now.leaves.items():  # what holds others comes before them
            before = self.leaves.get(path)
            is_new = before is None and (path.owner not in self.entered or path.steps[-1].kind == "mode")
            if leaf == before or is_new:
                continue
            if any(path.is_below(each) for each in opaque):
                continue
            if leaf.kind is LeafKind.CODE and not _is_other_code(before, leaf):
                continue
            if leaf.kind is LeafKind.MODULE and before is not None and before.kind is LeafKind.MODULE:
                continue  # replaced: its tensors are compared
            if leaf.kind in (LeafKind.OPAQUE, LeafKind.MODULE, LeafKind.CODE):
                opaque.append(path)
            found[path] = leaf
        return found


def take(
    subjects: Subjects, clock: Callable[[], float] = time.thread_time, *, objects: int = 20_000, seconds: float = 0.5
) -> Census:
    """Walk from the roots, nearest objects first, and large containers last.

    Args:
        clock: returns seconds; of a processor, so that a machine under load does not see less.
        objects: values that are looked at, at most.
        seconds: time that the walk takes at most.
    """
    import torch

    walk = _Walk(subjects, objects, lambda: clock() < end)
    end = clock() + seconds
    with torch._C.DisableTorchFunctionSubclass():  # seam: torch 2.6-2.13; else reading a tensor may run a user's code
        return walk.run()


def tensors_with(subjects: Subjects, path: Path) -> list[Path]:
    """Return the paths of all tensors of the module that a tensor of it was found in, unless others capture them.

    A module that is updated is updated as a whole: none of it may stay behind because only a sample was compared.

    Args:
        path: path of the tensor.
    """
    above = (Path(path.root, path.steps[:count]) for count in range(1, len(path.steps)))
    outer = next((each for each in above if is_module(get(subjects.roots, each))), None)
    if outer is None:
        return [path]
    module, captured = get(subjects.roots, outer), subjects.identities()
    others = {id(part) for each in subjects.captured if is_module(each) for _, part in submodules(each)}
    found = []
    for names, part in submodules(module):
        if id(part) in others and id(module) not in others:  # a loss holds the trained model
            continue
        steps = [Step(".", name) for name in names]
        for name, tensor in tensors_of(part).items():
            if id(tensor) not in captured:
                found.append(Path(outer.root, (*outer.steps, *steps, Step("tensor", name))))
    return found


def trained(subjects: Subjects, walked: Census) -> dict[Path, Leaf]:
    """Return the leaves that an optimizer updates, changed or not: a loss with weights may wait for its first batch."""
    updated = {id(tensor) for tensor in subjects.trained}
    tensors = {path: leaf for path, leaf in walked.leaves.items() if leaf.kind is LeafKind.TENSOR} if updated else {}
    return {path: leaf for path, leaf in tensors.items() if id(get(subjects.roots, path)) in updated}


def is_captured(leaf: Leaf, before: str) -> bool:
    """Return whether what has changed can be captured and restored.

    Args:
        before: the name of the type that was there at the start of the launch.
    """
    if leaf.kind is LeafKind.INSTANCE:  # its class is that of what each launch begins with
        return leaf.type == before or can_be_made(leaf.type, None, leaf.kind)
    return leaf.kind in (LeafKind.DATA, LeafKind.STATEFUL, LeafKind.TENSOR)


def made(before: Census, start: Census) -> set[Path]:
    """Return the paths of tensors, and of data with tensors, that came between two censuses: maybe copies of weights.

    Args:
        before: taken before a framework starts a training.
        start: taken before its first step.
    """
    found = {path for path, leaf in start.leaves.items() if leaf.arrays and leaf != before.leaves.get(path)}
    return {path for path in found if not any(path.is_below(each) for each in before.left_out)}


class _Walk:
    def __init__(self, subjects: Subjects, objects: int, has_time: Callable[[], bool]) -> None:
        self._subjects = subjects
        self._left = objects
        self._has_time = has_time
        self._known = identities(subjects.captured)  # of captured modules, also what nobody saves all the same
        self._captured = self._known - {id(tensor) for tensor in subjects.unsaved}
        self._seen: set[int] = set()
        self._stateful: set[int] = set()
        self._queue: deque[tuple[Path, Any, int, Any]] = deque()
        self._large: deque[tuple[Path, Any, int, Any]] = deque()
        self._census = Census()

    def run(self) -> Census:
        for name, root in self._subjects.roots.items():
            self._enter(Path(name), root, self._subjects.depth, root)
        while waiting := self._queue or self._large:
            if self._left <= 0 or not self._has_time():
                self._census.left_out += [path for path, *_ in (*self._queue, *self._large)]
                break
            path, owner, depth, holder = waiting.popleft()
            self._census.entered.add(path)
            if is_module(owner):
                self._census.hooks[path] = sum(map(len, hooks(owner)))
            for step, value in content(owner):
                below = Path(path.root, (*path.steps, step))
                try:
                    self._visit(below, value, owner, depth, holder)
                except Exception:  # of any kind: a tensor of a library may refuse whatever is asked of tensors
                    self._add(below, LeafKind.OPAQUE, value, None)
        return self._census

    def _enter(self, path: Path, owner: Any, depth: int, holder: Any) -> None:
        if id(owner) not in self._seen:
            self._seen.add(id(owner))
            is_large = container(owner) is not None and size(owner) > _MANY
            (self._large if is_large else self._queue).append((path, owner, depth, holder))

    def _visit(self, path: Path, value: Any, owner: Any, depth: int, holder: Any) -> None:
        self._left -= 1
        if (numbers := numbers_in(value)) is not None:
            path, value, owner = path.to("memory", len(numbers)), numbers, value
        if self._is_ignored(path) or (is_a(owner, types.FunctionType) and self._is_captured_of(owner, path.steps[-1])):
            return
        if is_a(value, *CODE, *HOLDING):
            overrides = any(path.steps[-1].key in vars(kind) for kind in type(owner).__mro__)
            self._add(path, LeafKind.CODE, value, (_code(value), overrides))
            home = str(value.__module__) if is_a(value, types.FunctionType) else ""
            if is_a(value, *HOLDING) and not home.startswith((*self._subjects.foreign, *_FOREIGN)):
                self._enter(path, value, depth, value)
            return
        if self._is_passed_over(value) or (self._subjects.enters_data and _is_of_trainer(path, value)):
            return
        kind = container(value)
        is_short_row = is_row(value, self._subjects.longest_row)
        if kind is not None and not is_short_row and size(value) > self._subjects.largest:
            self._census.left_out.append(path)
        elif path.steps[-1].kind == "tensor":
            self._add(path, LeafKind.TENSOR, value, value_digest(value, sampled_above=_SAMPLE_OF_MODULE), [value])
        elif is_short_row or (arrays := self._arrays_of_data(value)) is not None:
            fixed = not can_be_assigned(owner, path.steps[-1], value)
            digest = row_digest(value) if is_short_row else fingerprint(value)
            held = ([value] if is_array(value) else []) if is_short_row else arrays
            self._add(path, LeafKind.OPAQUE if fixed else LeafKind.DATA, value, digest, held or ())
        elif kind is dict and self._has_addresses(value):
            self._add(path, LeafKind.OPAQUE, value, value_digest(value, sampled_above=_SAMPLE, untouched=True))
        elif is_module(value):
            self._add_module(path, value)
            self._enter(path, value, depth, value)  # on the level of the object that holds it: modules nest deeply
        elif is_generator(value) or has_state(value):
            if id(value) not in self._stateful:
                self._stateful.add(id(value))
                self._add_stateful(path, value)
        elif is_instance(value) and (arrays := self._arrays_of_data(data := data_of_instance(value))) is not None:
            kept = LeafKind.INSTANCE if can_be_assigned(owner, path.steps[-1], value) else LeafKind.OPAQUE
            self._add(path, kept, value, fingerprint(data), arrays)
        elif kind in (dict, list, tuple):
            self._add(path, LeafKind.OPAQUE, value, size(value))
            self._enter(path, value, depth, holder)
        else:
            self._add(path, LeafKind.OPAQUE, value, _opaque_digest(value))
            below = depth - (not wraps(holder, value))
            if below and not is_a(value, *_CLOSED) and not is_loader_iterator(value):
                self._enter(path, value, below, value)

    def _is_ignored(self, path: Path) -> bool:
        ignored, name = self._subjects.ignored, str(path.steps[-1].key)
        if f"*.{name}" in ignored or "warn" in name:  # such a set or flag only keeps a warning from being repeated
            return True
        return len(path.steps) <= DEPTH and str(path) in ignored

    def _is_captured_of(self, code: Any, step: Step) -> bool:
        """Return whether others capture a variable or an attribute of a function."""
        return id(cell_of(code, step.key) if step.kind == "held" else attributes(code)) in self._captured

    def _is_passed_over(self, value: Any) -> bool:
        if type(value) in PLAIN or value is None or is_a(value, enum.Enum):  # a member is shared by all who hold it
            return False
        if id(value) in self._captured:
            return True
        if is_trained(value) if self._subjects.enters_data else _is_data_source(value):
            return True
        if is_module(value):
            return False
        home = type(value).__module__
        # The generators of torch are of ``torch._C``.
        is_state = is_generator(value) or home == "multiprocessing.sharedctypes"
        return home.startswith(self._subjects.foreign) or (home.startswith(_FOREIGN) and not is_state)

    def _add(self, path: Path, kind: LeafKind, value: Any, digest: Any, arrays: Sequence[Any] = ()) -> None:
        self._census.leaves[path] = Leaf(kind, type_name(value), digest, tuple(map(weakref.ref, arrays)))

    def _add_module(self, path: Path, value: Any) -> None:
        held = (each for _, part in submodules(value) for each in tensors_of(part).values())
        if any(id(each) not in self._known for each in held):
            self._add(path, LeafKind.MODULE, value, None)
        else:
            self._add(path, LeafKind.CODE, value, _Class(id(value), type(value)))

    def _add_stateful(self, path: Path, value: Any) -> None:
        try:
            digest = value_digest(state_of(value), sampled_above=_SAMPLE, untouched=True)
        except NotSerialisable:
            self._add(path, LeafKind.OPAQUE, value, None)
        else:
            self._add(path, LeafKind.STATEFUL, value, digest)

    def _arrays_of_data(self, value: Any) -> list[Any] | None:
        """Return the tensors and arrays in a value; ``None`` where it is not only data that nobody captures."""
        waiting, count, arrays = [value], 0, []
        while waiting:
            each = waiting.pop()
            kind = type(each)
            count += 1
            if each is None or kind in PLAIN:
                continue
            is_dict = is_a(each, dict)
            if count > _LARGEST or id(each) in self._captured or (is_dict and self._has_addresses(each)):
                return None
            if kind in CONTAINERS:
                waiting.extend(each)
                if is_dict:
                    waiting.extend(each.values())
            elif not _is_leaf_data(each):
                return None
            elif is_array(each):
                arrays.append(each)
        self._left -= count - 1
        return arrays

    def _has_addresses(self, held: Any) -> bool:
        """Return whether keys of a dict are identities of what is trained: those of another process are others."""
        return not self._known.isdisjoint(key for key in dict.keys(held) if type(key) is int)


TRAINERS = ("accelerate.", "deepspeed.", "lightning.", "pytorch_lightning.", "transformers.trainer")
"""Libraries whose objects change as the training goes on."""

PLAIN = frozenset((bool, int, float, str, bytes))
"""Types of numbers and words."""

CONTAINERS = frozenset((list, tuple, set, frozenset, dict, OrderedDict, defaultdict, Counter, deque))
_CLOSED = (types.GeneratorType, types.CoroutineType, enum.Enum, set, frozenset, deque)
CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, property)
"""What is not entered: it leads to all that is imported."""

_OF_ALL = ("abc", "builtins", "collections.abc", "typing")
"""Modules of classes that say nothing of what an object is."""

_FOREIGN = (
    *("_thread", "asyncio", "concurrent.", "functools", "logging", "multiprocessing", "socket", "ssl", "threading"),
    *("tqdm", "weakref", "torch.distributed", "torch.utils.hooks", "torch._", "resume_adapters."),
    "bitsandbytes.",
)
"""Modules of machinery: pools, loaders, process groups. They hold no state of a training, or others capture it."""


_WRAPPERS = ("torch.nn.parallel.", "torch.distributed.", "torch._dynamo.", "deepspeed.")
"""Modules of Python whose torch modules wrap others: their own attributes are machinery."""


def identities(objects: Iterable[Any]) -> set[int]:
    """Return the identities of objects; of a module, also of what its state dict holds."""
    found = set()
    for each in objects:
        found.add(id(each))
        for _, module in submodules(each) if is_module(each) else ():
            unsaved = attributes(module).get("_non_persistent_buffers_set", ())
            found.update(id(tensor) for name, tensor in tensors_of(module).items() if name not in unsaved)
    return found - {id(None)}


def content(owner: Any) -> Iterator[tuple[Step, Any]]:
    """Yield what an object holds."""
    kind = container(owner)
    if kind is dict:
        yield from ((Step("[]", key), value) for key, value in list(dict.items(owner)) if type(key) in PLAIN)
    elif kind in (list, tuple):
        yield from ((Step("[]", index), value) for index, value in enumerate(items(owner)))
    elif is_module(owner):
        yield from _module_content(owner)
    elif is_a(owner, *HOLDING):
        yield from ((Step("held", name), value) for name, value in held_by_code(owner).items())
    if not is_module(owner):  # a class derived from one of these has attributes as well
        yield from _attributes(owner)


def _attributes(owner: Any) -> Iterator[tuple[Step, Any]]:
    held = {**attributes(owner), **in_slots(owner)}
    yield from ((Step(".", name), value) for name, value in held.items())


def _module_content(module: Any) -> Iterator[tuple[Step, Any]]:
    for name, tensor in tensors_of(module).items():
        yield Step("tensor", name), tensor
        if name in _parameters(module):
            yield Step("requires_grad", name), bool(tensor.requires_grad)
    is_wrapper = type(module).__module__.startswith(_WRAPPERS)
    for step, value in () if is_wrapper else _attributes(module):
        if step.key not in _plain_module():
            yield step, value
    mode = attributes(module).get("training")
    for name, child in inside(module, "_modules").items():
        if child is not None:
            # As that of what holds it: an evaluation changes both, and leaves one alone that was in another.
            yield Step("mode", name), attributes(child).get("training") == mode
            yield Step(".", name), child


@functools.cache
def _plain_module() -> frozenset[str]:
    """Return the attributes that every module has: hooks, its mode, what :func:`_module_content` yields otherwise."""
    import torch

    return frozenset(vars(torch.nn.Module()))


def hooks(module: Any) -> list[Any]:
    """Return the dicts in which a module and its tensors hold hooks, and flags of them."""
    import torch

    held = [*attributes(module).items()]
    found = [each for name, each in held if name in _plain_module() and "_hooks" in name]
    for tensor in tensors_of(module).values():
        if type(tensor) in (torch.Tensor, torch.nn.Parameter):  # seam: torch 2.6-2.13
            found += filter(None, (tensor._backward_hooks, tensor._post_accumulate_grad_hooks))
    return found


def fingerprint(value: Any) -> Any:
    """Return what is equal for two values that are the same data."""
    if value is None or type(value) in (bool, int, str, bytes):
        return value
    return value.hex() if type(value) is float else value_digest(value, sampled_above=_SAMPLE)


def wraps(holder: Any, value: Any) -> bool:
    """Return whether an object holds one of its kind, as a wrapper or a configuration does: they may nest deeply."""
    shared = {*type(holder).__mro__} & {*type(value).__mro__}
    return any(each.__module__ not in _OF_ALL for each in shared)


def _is_other_code(before: Leaf | None, leaf: Leaf) -> bool:
    """Return whether other code was there, a method, or ``None``; what is made late is so once more."""
    if before is not None and before.kind is LeafKind.CODE:
        return bool(before.fingerprint != leaf.fingerprint)
    if is_a(leaf.fingerprint, _Class):
        return False
    return bool(leaf.fingerprint[1]) if before is None else before.type == type_name(None)


@dataclass(frozen=True, eq=False)
class _Class:
    """What differs where a module has been replaced by one of another class, and not where its own has become another.

    A lazy module has another class from its first batch on, one with a parametrization from its registration.
    """

    identity: int
    kind: type

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Class) and (self.identity == other.identity or self.kind is other.kind)


def _code(value: Any) -> Any:
    """Return what differs for two functions, methods or classes that do not do the same."""
    if is_a(value, functools.partial):
        given = [*enumerate(value.args), *value.keywords.items()]
        return (_code(value.func), [(name, each if type(each) in PLAIN else type_name(each)) for name, each in given])
    if is_a(value, types.FunctionType):
        return value.__code__  # what it holds is looked at by itself
    if is_a(value, types.MethodType, types.BuiltinFunctionType):
        return (value.__qualname__, id(value.__self__))
    return value if is_a(value, type) else type_name(value)


def _opaque_digest(value: Any) -> Any:
    """Return what differs once an object has changed that is not data; ``None`` where only its attributes can tell."""
    if is_a(value, enum.Enum):
        return attributes(value).get("_name_")
    if is_loader_iterator(value):
        return attributes(value).get("_num_yielded")  # seam: torch 2.13
    if has_attributes(value) and container(value) is None and not is_array(value):
        return None
    return value_digest(value, sampled_above=_SAMPLE, untouched=True)


def is_loader_iterator(value: Any) -> bool:
    """Return whether a value is a pass over a ``DataLoader``, whose workers and counters belong to this launch."""
    from torch.utils.data.dataloader import _BaseDataLoaderIter  # seam: torch 2.13

    return is_a(value, _BaseDataLoaderIter)


def _is_leaf_data(value: Any) -> bool:
    import torch

    if type(value) in (torch.Tensor, torch.nn.Parameter):
        return value.layout is torch.strided and not value.is_quantized and not value.is_meta
    return encoding.is_numeric(value) or type(value) is torch.dtype


def _is_data_source(value: Any) -> bool:
    """Return whether a value is read ahead of the training: where it is, the positions of the loaders say."""
    from torch.utils.data import DataLoader, Dataset, Sampler

    return is_a(value, DataLoader, Dataset, Sampler)


def _parameters(module: Any) -> list[str]:
    return [name for name, each in inside(module, "_parameters").items() if each is not None]


def is_trained(value: Any) -> bool:
    """Return whether a value is a module with parameters: a collate function may hold the model."""
    return is_module(value) and any(_parameters(each) for _, each in submodules(value))


def _is_of_trainer(path: Path, value: Any) -> bool:
    """Return whether only code leads to a value that trains, or holds what does: it is no part of the data."""
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader

    if all(step.kind != "held" for step in path.steps):
        return False
    return any(
        is_a(each, DataLoader, Optimizer) or is_trained(each) or type(each).__module__.startswith(TRAINERS)
        for each in (value, *attributes(value).values())
    )


def has_state(value: Any) -> bool:
    """Return whether the class of a value has ``state_dict()`` and ``load_state_dict()``."""
    return all(callable(getattr(type(value), name, None)) for name in ("state_dict", "load_state_dict"))

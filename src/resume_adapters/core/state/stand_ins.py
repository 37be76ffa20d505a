"""Read files of ``torch.save`` that hold more than data: stand-ins take the place of what is not loaded.

Torch refuses such a file as a whole, also where nobody reads the objects in it, as with hyperparameters. Here a file is
read whatever it holds: objects of any class, containers of their own class, arrays of objects. No code that a file
names is run, nor that of such a class.
"""

from __future__ import annotations

import _compat_pickle
import contextlib
import functools
import pickle
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

from resume_adapters.core.patching import replaced
from resume_adapters.core.state.safe_load import data_classes

_FILLED = (dict, list, set, OrderedDict, Counter)
"""What torch fills after it was made."""

_CONTAINERS = (dict, list, set, deque)
"""What a class may derive from that has to be filled: then it is not loaded, even where torch was told of it."""

_UNUSED = (pickle.INST, pickle.OBJ, pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.NEWOBJ_EX)
"""Instructions that make or find objects, and that ``torch.save`` does not write."""


class Opaque:
    """An object that is not loaded: it has what the file has for it.

    Attributes:
        arguments: what it was to be made with.
        state: its state; ``None`` where it has none.
        items: what it contains, as a list or a set does.
        entries: what it contains, as a dict does.
    """

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None
        self.items: list[Any] = []
        self.entries: dict[Any, Any] = {}

    def __new__(cls, *arguments: Any) -> Opaque:
        """Make one; the unpickler does not call ``__init__`` for every class."""
        made = super().__new__(cls)
        Opaque.__init__(made, *arguments)
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __deepcopy__(self, memo: Any) -> Opaque:
        """Return the same one, which nothing changes."""
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        self.entries[key] = value

    def add(self, item: Any) -> None:
        """Add an item, as a set does."""
        self.items.append(item)

    append = add

    def extend(self, items: Iterable[Any]) -> None:
        """Add items, as a list does."""
        self.items.extend(items)


def stand_in(name: str) -> type[Opaque]:
    """Return a class that stands in for another one while a file is read, so that no code of that one runs.

    Args:
        name: module and name of the class.
    """
    module, _, plain = name.rpartition(".")
    return type(plain, (Opaque,), {"__module__": module, "__qualname__": plain})


def is_stand_in(value: Any) -> bool:
    """Return whether a value, or a class, stands in for what was not loaded."""
    return issubclass(value if isinstance(value, type) else type(value), Opaque)


def stand_ins(content: Mapping[Any, Any], is_read: Callable[[str], bool]) -> dict[str, str]:
    """Return the stand-ins in what was read from a file: the name of each class, by where the first one is.

    Args:
        content: what torch returned.
        is_read: returns whether what it has under a key is looked at, and an object at a place such as ``"key.0"``.
    """
    found: dict[str, str] = {}
    waiting = [(str(key), value) for key, value in content.items() if is_read(str(key))]
    known: set[int] = set()
    while waiting:
        place, value = waiting.pop()
        is_odd = is_stand_in(value)
        if id(value) in known or (is_odd and not is_read(place)):
            continue
        known.add(id(value))
        if is_odd:
            kind = value if isinstance(value, type) else type(value)
            found.setdefault(f"{kind.__module__}.{kind.__qualname__}", place)
        waiting.extend((f"{place}.{key}", child) for key, child in _inside(value))
    return found


def _inside(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
        yield from ((key, key) for key in value)
    elif isinstance(value, list | tuple | set | frozenset):
        yield from enumerate(value)
    elif getattr(getattr(value, "dtype", None), "hasobject", False):
        yield from enumerate(value.ravel().tolist())
    if not isinstance(value, type):
        yield from getattr(value, "__dict__", {}).items()


# ---- Reading


@contextlib.contextmanager
def standing_in(names: Set[str] | None = None) -> Iterator[set[str]]:
    """Return the context in which ``torch.load(weights_only=True)`` reads stand-ins for what is not data.

    Args:
        names: of what may be stood in for; ``None``: of anything.

    Yields:
        The names of what was stood in for, as they are found.
    """
    from torch import _weights_only_unpickler

    used: set[str] = set()
    unpickler = type("_Unpickler", (_Unpickler,), {"names": names, "used": used})
    # seam: torch 2.6 to 2.13: torch.load looks this name up each time. Its own one has no hook for what it refuses.
    with replaced(_weights_only_unpickler, "Unpickler", unpickler):
        yield used


def load(file: Path) -> Any:
    """Return what a file holds, with stand-ins for what is neither torch's own nor of a class of data.

    It changes nothing of torch meanwhile: the training may load something on another thread.
    """
    import torch

    classes = {f"{each.__module__}.{each.__qualname__}": each for each in data_classes()}
    unpickler = type("_Unpickler", (_Unpickler,), {"classes": classes, "used": set()})
    module = SimpleNamespace(__name__=__name__, Unpickler=unpickler)
    return torch.load(file, map_location="cpu", weights_only=False, mmap=True, pickle_module=module)


def _loaded() -> dict[str, Any]:
    """Return what torch makes of a file, by name: what it knows, and what it was told of."""
    from torch import _weights_only_unpickler

    known: Any = _weights_only_unpickler  # seam: torch 2.6 to 2.13: its two lists
    every = {**known._get_user_allowed_globals(), **known._get_allowed_globals()}
    return {name: each for name, each in every.items() if each in _FILLED or not _is_container(each)}


def _is_container(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, _CONTAINERS)


def _of_python_3(module: str, name: str) -> str:
    """Return what a name of the pickles that Python 2 could read is called today."""
    if (module, name) in _compat_pickle.NAME_MAPPING:
        module, name = _compat_pickle.NAME_MAPPING[module, name]
    return f"{_compat_pickle.IMPORT_MAPPING.get(module, module)}.{name}"


class _Unpickler(pickle._Unpickler):
    """Makes what torch would make of a file, and stand-ins for all else.

    It calls nothing but what torch would call, and fills nothing but what torch would fill.
    """

    names: Set[str] | None = None
    classes: Mapping[str, Any] = {}
    used: set[str]
    stack: list[Any]
    metastack: list[list[Any]]

    def __init__(self, file: BinaryIO, **options: Any) -> None:
        super().__init__(file, **options)
        self._loaded = {**self.classes, **_loaded()}
        self._known = {id(each) for each in self._loaded.values()}
        self._absent: dict[str, type[Opaque]] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return what a file names, or a class that stands in for it."""
        full = _of_python_3(module, name)
        return self._loaded[full] if full in self._loaded else self._stand_in(full)

    def _stand_in(self, name: str) -> type[Opaque]:
        if self.names is not None and name not in self.names:
            raise pickle.UnpicklingError(f"{name} is named, which torch does not load")
        self.used.add(name)
        if name not in self._absent:
            self._absent[name] = stand_in(name)
        return self._absent[name]

    def make(self, code: int) -> None:
        """Call what a file names with arguments; what would get a stand-in is not called, and becomes one."""
        import numpy as np

        arguments, function = self.stack[-1], self.stack[-2]
        odd = next(filter(is_stand_in, (function, *arguments)), None)
        if odd is not None:
            self.stack[-2:] = [(odd if isinstance(odd, type) else type(odd))(*arguments)]
            return
        if id(function) not in self._known:
            raise pickle.UnpicklingError(f"{function!r} is called, which torch does not load")
        _NATIVE[code](self)
        made = self.stack[-1]
        if isinstance(made, np.dtype) and id(type(made)) not in self._known:
            self.stack[-1] = self._stand_in("numpy.dtype")(*arguments)

    def build(self) -> None:
        """Give an object its state."""
        import numpy as np

        state, made = self.stack[-1], self.stack[-2]
        if isinstance(made, np.ndarray) and is_stand_in(state[2]):
            self.stack[-1] = _of_objects(state)
        elif not is_stand_in(made) and id(type(made)) not in self._known:
            raise pickle.UnpicklingError(f"a {type(made).__name__} gets a state, which torch does not give it")
        _NATIVE[pickle.BUILD[0]](self)

    def fill(self, code: int, depth: int) -> None:
        """Fill the container that is so far down the stack; 0 where it lies below a mark."""
        filled = self.stack[-depth] if depth else self.metastack[-1][-1]
        if type(filled) not in _FILLED and not is_stand_in(filled):
            raise pickle.UnpicklingError(f"a {type(filled).__name__} is filled, which torch does not fill")
        _NATIVE[code](self)


def _of_objects(state: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the state of an array whose kind of items is not loaded: its objects, or one stand-in for the whole.

    An array of objects gets a dtype of ours: with that of a file, numpy may take bytes of the file for addresses.
    """
    import numpy as np

    version, shape, dtype, is_fortran, items = state
    if isinstance(items, list) and str(dtype.arguments[0]).startswith("O"):
        return version, shape, np.dtype(object), is_fortran, items
    whole = stand_in("numpy.ndarray")()
    whole.state = state
    return version, (1,), np.dtype(object), False, [whole]


# seam: CPython 3.10 to 3.14: the unpickler in Python has a table of its instructions.
_NATIVE: Mapping[int, Callable[[Any], None]] = pickle._Unpickler.dispatch
_BELOW_A_MARK = 0
_FILLS = {
    pickle.APPEND[0]: 2,
    pickle.SETITEM[0]: 3,
    **dict.fromkeys((pickle.APPENDS[0], pickle.SETITEMS[0], pickle.ADDITEMS[0]), _BELOW_A_MARK),
}
_instructions: dict[int, Callable[[Any], None]] = {
    **{code: instruction for code, instruction in _NATIVE.items() if bytes([code]) not in _UNUSED},
    **{code: functools.partial(_Unpickler.make, code=code) for code in (pickle.REDUCE[0], pickle.NEWOBJ[0])},
    **{code: functools.partial(_Unpickler.fill, code=code, depth=depth) for code, depth in _FILLS.items()},
    pickle.BUILD[0]: _Unpickler.build,
}
_Unpickler.dispatch = _instructions

"""What the functions and classes of a script keep from one call to the next: a mean, a generator, a table of losses.

It is in variables of their module, in those of an outer function that has returned, in defaults, and in attributes.
Each of these is copied before it is gone through: a thread of the script may add to it.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Container, Iterable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from resume_adapters.core.observed import walk
from resume_adapters.core.observed.paths import is_module, submodules
from resume_adapters.core.observed.script import is_code_of_script, is_of_script
from resume_adapters.core.observed.walk import CONTAINERS
from resume_adapters.core.state.rng import is_generator
from resume_adapters.core.state.untouched import attributes, cell_of, cells, held_by_code, is_a

KEEPING = (FunctionType, type)
"""What may keep something from one call to the next."""

_MOST = 10_000
"""Functions, classes and modules that are looked at: a library may be developed where the script is."""

_DEEP = 4
"""Objects through which something is held by what others save: a transform by a dataset, that by a loader."""

_MANY = 1_000
"""Items of a container in which such objects are looked for."""

_METHODS = (MethodType, classmethod, staticmethod)

_STORES = {dis.opmap["STORE_GLOBAL"], dis.opmap["STORE_DEREF"]}


def code_among(values: list[Any]) -> Iterator[Any]:
    """Yield functions and classes of the script: those among some values, those of them, and what they use in turn."""
    seen = set[int]()
    for each in values:  # which grow: nearest first
        code = each if is_a(each, *KEEPING, ModuleType) else type(each)
        if id(code) in seen or len(seen) > _MOST:
            continue
        seen.add(id(code))
        if is_a(code, ModuleType):
            names = attributes(code) if is_of_script(str(attributes(code).get("__file__") or "<")) else {}
            values += [held for held in [*names.values()] if is_a(held, *KEEPING, ModuleType)]
        elif is_code_of_script(code):
            yield code
            values += [each.__func__ if is_a(each, *_METHODS) else each for each in [*vars(code).values()]]
            values += [*cells(code).values(), *named(code).values(), *getattr(code, "__bases__", ())]


def replaced_by(code: Any, known: Container[int]) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a function or a class, and what a function gives another value, by name.

    Args:
        known: identities of what others capture: of cells, and of the dict of a function.
    """
    held = [*vars(code).items()] if id(attributes(code)) not in known else []
    own = [(name, each) for name, each in held if not (name.startswith("__") or is_a(each, *KEEPING))]
    yield from ((f"{code.__name__}.{name}", each) for name, each in own)
    if is_a(code, FunctionType):
        outside = {**named(code), **cells(code)}
        others = [name for name in _read_and_stored(code.__code__) if id(cell_of(code, name)) not in known]
        yield from ((name, outside[name]) for name in others if name in outside)


def kept_by(code: Any) -> dict[str, Any]:
    """Return what a function may change and has at its next call: its defaults, and variables of outer functions."""
    if not is_a(code, FunctionType):
        return {}
    defaults = code.__defaults__ or ()
    given = code.__code__.co_varnames[code.__code__.co_argcount - len(defaults) :]
    return {**dict(zip(given, defaults, strict=False)), **(code.__kwdefaults__ or {}), **cells(code)}


def named(code: Any) -> dict[str, Any]:
    """Return the variables of its module that a function uses; none for a class, or for what a library wraps it in."""
    if not is_a(code, FunctionType) or not is_of_script(code.__code__.co_filename):
        return {}
    return {name: code.__globals__[name] for name in _names(code.__code__) if name in code.__globals__}


def generators_of(objects: Iterable[Any]) -> dict[str, Any]:
    """Return the random generators that the code of some objects, and of what hangs on them, keeps; by name."""
    found = {}
    for code in code_among([*held_by(objects)]):
        for within, kept in (("", named(code)), (f"{code.__qualname__}.", {**vars(code), **kept_by(code)})):
            drawn = {name: each for name, each in kept.items() if is_generator(each)}
            found.update({f"{code.__module__}.{within}{name}": each for name, each in drawn.items()})
    return found


def hooks_of(value: Any) -> Iterator[Any]:
    """Yield what is called as a module runs, or as a tensor of it gets a gradient; of a method, the object."""
    if is_module(value):
        found = [hook for each in walk.hooks(value) for hook in dict.values(each)]
        yield from (each.__self__ if is_a(each, MethodType) else each for each in found)


@functools.lru_cache(maxsize=1 << 14)  # all code of the script, and asked for at each look
def _names(code: CodeType) -> frozenset[str]:
    """Return the names that a function, or one within it, takes from its module; and those of attributes."""
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return frozenset(code.co_names).union(*map(_names, inner))


@functools.lru_cache(maxsize=1 << 14)
def _read_and_stored(code: CodeType) -> set[str]:
    """Return the names from outside that a function reads, and gives another value later."""
    read, found = set[str](), set[str]()
    # Nearly all functions have no such name: to disassemble each takes long.
    for each in dis.get_instructions(code) if {*code.co_code[::2]} & _STORES else ():
        if each.opname in ("LOAD_GLOBAL", "LOAD_DEREF"):
            read.add(each.argval)
        elif each.opname in ("STORE_GLOBAL", "STORE_DEREF") and each.argval in read:
            found.add(each.argval)
    return found


def held_by(objects: Iterable[Any]) -> Iterator[Any]:
    """Yield objects, and what hangs on them: the average that a part wraps, the generator of a sampler."""
    seen: set[int] = set()
    level = list(objects)
    for _ in range(_DEEP):
        level = [each for each in level if id(each) not in seen]
        seen.update(id(each) for each in level)
        yield from level
        level = [inner for each in level for inner in _content(each)]


def _content(value: Any) -> Iterable[Any]:
    if is_a(value, type, ModuleType):
        return ()
    if is_module(value):
        return [*(part for _, part in submodules(value)), *(held for _, held in walk.content(value))]
    if type(value) in CONTAINERS:
        return list(value.values() if is_a(value, dict) else value) if len(value) <= _MANY else ()
    # What functions hold is known by its path, once it is captured: those of a schedule or a hook are not looked into.
    held = {} if is_a(value, FunctionType) else held_by_code(value)
    return [*attributes(value).values(), *held.values()]

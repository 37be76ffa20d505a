"""Values that an epoch of a script begins with, made of what is trained: labels that a model gives, or a copy of it.

Nobody saves them, and a resume within the epoch makes others, of what is trained by then.

The source says which they are: names that the body of the epochs gives values, and that the body of a pass reads.
"""

from __future__ import annotations

import ast
import itertools
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

from resume_adapters.core.observed import script
from resume_adapters.core.observed.leaves import is_array, memory_of
from resume_adapters.core.observed.paths import inside, is_module, submodules, tensors_of
from resume_adapters.core.state.untouched import ABSENT, attributes, container, is_a, items

_PASSES = (".batches(", ".enumerate(")
"""What is in the head of a loop over the batches of a pass."""

_MANY = 100
"""Items of a container that are looked at."""

_DEEP = 4
"""Containers within each other that are looked at."""


def made_in_epoch(saved: Iterable[Any]) -> list[str]:
    """Return the variables of the running script that an epoch begins with, each with its file and line.

    Args:
        saved: what is saved of the training.
    """
    frames = script.script_frames()
    loops = [script.loops_around(script.scope_of(each.f_code), each.f_lineno) for each in frames]
    number = next((number for number, each in enumerate(loops) if script.over(each, _PASSES)), len(frames))
    if not any(script.over(each, script.EPOCHS) for each in loops[number:]):
        return []
    frame, own = frames[number], script.over(loops[number], script.EPOCHS)
    held = frame.f_locals
    found = _EpochBody(frame, ChainMap(dict(held), frame.f_globals), list(saved))
    script.release(held, frame.f_code)
    return found.made(own[-1] if own else script.scope_of(frame.f_code), script.over(loops[number], _PASSES)[0])


class _EpochBody:
    """What the body of an epoch does before its pass.

    Args:
        frame: what is running.
        held: its variables.
        saved: what is saved of the training.
    """

    def __init__(self, frame: FrameType, held: Mapping[str, Any], saved: list[Any]) -> None:
        parts = [part for each in saved if is_module(each) for _, part in submodules(each)]
        tensors = [each for part in parts for each in tensors_of(part).values()]
        self._trained = {id(each) for each in (*parts, *tensors)}
        self._memory = {memory_of(each) for each in tensors}
        self._saved = {id(each) for each in saved}
        self._held = held
        self._frame = frame
        self._following: dict[str, int] = {}

    def made(self, body: ast.AST, reader: ast.For) -> list[str]:
        """Return the variables that follow from what is trained, and that the body of a pass reads."""
        kept = set[str]()
        for node, line in script.before(reader, body, self._frame.f_lineno):
            for name, value in _given(node):
                if self._is_of_the_run(value):
                    kept.add(name)
                elif self._follows(value) and id(self._held.get(name)) not in self._saved:
                    self._following.setdefault(name, line)
        read = {
            each.id for each in script.within(reader) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)
        }
        found = [each for each in self._following if each in read - kept and self._is_made(self._held.get(each))]
        return [script.shown(each, self._frame.f_code, self._following[each]) for each in found]

    def _is_of_the_run(self, value: ast.expr) -> bool:
        """Return whether an expression reads ``run.memory``, or something else that is saved and is no module."""
        chains = list(_chains(value))
        read = [self._held.get(each[0]) for each in chains]
        of_memory = any("memory" in each[1:] for each in chains)
        return of_memory or any(id(each) in self._saved and not is_module(each) for each in read)

    def _follows(self, value: ast.expr) -> bool:
        return any(each[0] in self._following or self._leads_to_trained(each) for each in _chains(value))

    def _leads_to_trained(self, chain: list[str]) -> bool:
        value = self._held.get(chain[0])
        for name in chain[1:]:
            own = attributes(value)
            inner = [own, inside(value, "_modules"), tensors_of(value)] if is_module(value) else [own]
            found = next((each[name] for each in inner if name in each), ABSENT)
            if found is ABSENT:  # a method, or a property
                method = next((vars(kind)[name] for kind in type(value).__mro__ if name in vars(kind)), None)
                return callable(method) and self._holds_trained(value)
            value = found
        return self._holds_trained(value)

    def _holds_trained(self, value: Any) -> bool:
        if is_module(value):
            return any(id(part) in self._trained for _, part in submodules(value))
        inner = items(value)[:_MANY] if container(value) not in (None, dict) else attributes(value).values()
        return any(id(each) in self._trained for each in (value, *inner))

    def _is_made(self, value: Any, depth: int = _DEEP) -> bool:
        """Return whether a value is data, or a module, with memory of its own."""
        from torch.utils.data import DataLoader

        if is_array(value):
            return memory_of(value) not in self._memory
        if is_module(value):
            return any(self._is_made(each) for _, part in submodules(value) for each in tensors_of(part).values())
        inner = () if container(value) is None else dict.values(value) if is_a(value, dict) else items(value)
        is_data = is_a(value, float, DataLoader)
        return is_data or (depth > 0 and any(self._is_made(each, depth - 1) for each in itertools.islice(inner, _MANY)))


def _given(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names that a statement or a call gives something, each with what it is given."""
    yield from script.assignments(node)
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        yield node.target.id, node.value
    if isinstance(node, ast.Assign):
        bases = [each.value for each in node.targets if isinstance(each, ast.Subscript)]
        yield from ((each.id, node.value) for each in bases if isinstance(each, ast.Name))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
        given = [*node.args, *(each.value for each in node.keywords)]
        yield from ((node.func.value.id, each) for each in given)


def _chains(node: ast.AST) -> Iterator[list[str]]:
    """Yield the variables in an expression, each with the attributes that are taken of it."""
    names, each = list[str](), node
    while isinstance(each, ast.Attribute):
        names, each = [each.attr, *names], each.value
    if isinstance(each, ast.Name):
        yield [each.id, *names]
    else:
        for child in ast.iter_child_nodes(node):
            yield from _chains(child)

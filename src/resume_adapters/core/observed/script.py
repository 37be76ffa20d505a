"""Variables that a script carries from one step to the next, such as a patience: nobody saves them.

The source of the loop says which they are: names that have a value before it, and that its body reads and changes. Of
objects of the script's own classes, such as one that stops early, the attributes are compared.
"""

from __future__ import annotations

import ast
import linecache
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np

from resume_adapters.core.observed.walk import PLAIN, fingerprint
from resume_adapters.core.state.untouched import attributes, has_attributes, is_a

_NOT_THE_SCRIPT = (str(Path(__file__).parents[2]), str(Path(ast.__file__).parent), "<")
"""How the files of this package and of Python begin, and what has no file."""

_CLOCKS = ("time.", "time(", "perf_counter", "monotonic", "now(")
"""What is in an expression that asks for the time."""

_OF_THE_RUN = (".global_step", ".resume(", ".batches(")
"""What is in an expression that has another value where a run goes on."""

_LOOPS = (ast.For, ast.While)

_VALUES = (*PLAIN, np.float64, np.float32, np.int64)
"""Types of attributes that are compared."""

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


@dataclass(frozen=True)
class Place:
    """A call that is running in the script.

    Attributes:
        code: what is running.
        line: the line at which it is.
        data: the variables that hold data now.
        objects: the variables that hold objects of the script's own classes, with their attributes now. The script may
            let go of them.
    """

    code: CodeType
    line: int
    data: frozenset[str]
    objects: dict[str, tuple[weakref.ref[Any], dict[str, Any]]]


def calling_script() -> list[Place]:
    """Return where the script is now, innermost call first."""
    found = []
    for frame in script_frames():
        held = frame.f_locals
        data = frozenset(name for name, value in held.items() if _is_data(value))
        objects = {name: (weakref.ref(each), _attributes(each)) for name, each in held.items() if _is_own(each)}
        found.append(Place(frame.f_code, frame.f_lineno, data, objects))
        release(held, frame.f_code)
    return found


def script_frames() -> Iterator[FrameType]:
    """Yield the calls of the script that are running now, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_of_script(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def release(held: Any, code: CodeType) -> None:
    """Empty the copy that Python before 3.13 keeps of a function's variables once they were looked at.

    Else the batch and the outputs of this step stay in memory for the life of the function. A script that holds the
    copy itself, by ``locals()``, keeps it.
    """
    of_frame_and_callers = 4
    is_copy = isinstance(held, dict) and bool(code.co_flags & CO_OPTIMIZED)
    if is_copy and sys.getrefcount(held) == of_frame_and_callers:
        held.clear()


def carried(places: list[Place]) -> list[str]:
    """Return the variables that the loops around these places carry from step to step, each with its file and line."""
    return list(dict.fromkeys(name for place in places for name in _carried_at(place)))


def changed(places: list[Place]) -> list[str]:
    """Return the attributes of objects of the script that have changed since the places were found."""
    return list(dict.fromkeys(name for place in places for name in _changed_at(place)))


def of_the_run(places: list[Place]) -> set[str]:
    """Return the names of variables and attributes to which the script gives values that follow from the run."""
    trees = [_tree(file) for file in {place.code.co_filename for place in places}]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    given = [node for node in nodes if any(word in ast.unparse(node.value) for word in _OF_THE_RUN)]
    return {ast.unparse(each).rpartition(".")[2] for node in given for each in node.targets}


def _changed_at(place: Place) -> Iterator[str]:
    restored = of_the_run([place])
    for name, (reference, before) in place.objects.items():
        each = reference()
        for attribute, value in _attributes(each).items() if each is not None else ():
            if attribute not in restored and (attribute not in before or before[attribute] != value):
                yield f"`{name}.{attribute}` (of a {type(each).__name__})"


def _is_of_script(file: str) -> bool:
    return not file.startswith(_NOT_THE_SCRIPT) and "site-packages" not in Path(file).parts


def _is_own(each: Any) -> bool:
    """Return whether an object is of a class of the script, and neither saves itself nor gives data."""
    known = callable(each) or any(hasattr(type(each), name) for name in ("state_dict", "__iter__", "__getitem__"))
    return is_of_class_of_script(each) and hasattr(type(each), "__weakref__") and not known


def is_of_class_of_script(each: Any) -> bool:
    """Return whether an object with attributes is of a class of the script."""
    return is_code_of_script(type(each)) and has_attributes(each)


def is_code_of_script(each: Any) -> bool:
    """Return whether a class or a function is of the script."""
    return _is_of_script(getattr(sys.modules.get(each.__module__), "__file__", None) or "<")


def rebound(code: CodeType, line: int) -> set[str] | None:
    """Return the names to which a step of the loops around a line gives values; ``None`` where there is no source."""
    if not linecache.getlines(code.co_filename):
        return None
    scope = _scope(code.co_filename, code)
    loops = [node for node in _within(scope) if isinstance(node, _LOOPS) and _holds(node, line)]
    names = [node for loop in loops for node in _within(loop) if isinstance(node, ast.Name)]
    return {node.id for node in names if isinstance(node.ctx, ast.Store)}


def _attributes(each: Any) -> dict[str, Any]:
    held = attributes(each).items()
    return {name: fingerprint(value) for name, value in held if value is None or type(value) in _VALUES}


def _carried_at(place: Place) -> Iterator[str]:
    file = place.code.co_filename
    scope = _scope(file, place.code)
    loops = [node for node in _within(scope) if isinstance(node, _LOOPS) and _holds(node, place.line)]
    if not loops:
        return
    run = _receiver(loops[-1], place.line)
    values: dict[str, ast.expr] = {}
    lines: dict[str, int] = {}
    for node in _leading_to(scope, place.line):
        for name, value in _assignments(node) if getattr(node, "lineno", place.line) < loops[-1].lineno else ():
            values[name], lines[name] = value, getattr(node, "lineno", 0)
    for name in [each for each in values if each in place.data]:
        if _begins_again(values[name], run, values) and any(
            _is_carried(loop, name, grows=_is_container(values[name])) for loop in loops if loop.lineno > lines[name]
        ):
            yield f"`{name}` ({Path(file).name}:{lines[name]})"


def _is_data(value: Any) -> bool:
    """Return whether a value is data, or gives data one after the other."""
    kinds = (int, float, complex, str, bytes, type(None), list, tuple, dict, set, Iterator)
    return is_a(value, *kinds) or hasattr(type(value), "__array__")


def _receiver(loop: ast.AST, line: int) -> str:
    """Return how the script writes the run whose method it calls at a line; nothing where it calls another function."""
    calls = [node for node in _within(loop) if isinstance(node, ast.Call) and node.lineno <= line <= _end(node)]
    steps = [each.func for each in calls if isinstance(each.func, ast.Attribute) and each.func.attr == "step"]
    return ast.unparse(steps[0].value) if steps else ""


def _begins_again(value: ast.expr, run: str, values: dict[str, ast.expr]) -> bool:
    """Return whether a variable has the same value at the start of each launch: none that follows from the run."""
    words = [value, *(values[each.id] for each in ast.walk(value) if isinstance(each, ast.Name) and each.id in values)]
    varying = (*_CLOCKS, *_OF_THE_RUN, *([f"{run}."] if run else []))
    return not any(word in ast.unparse(each) for each in words for word in varying)


def _end(node: ast.stmt | ast.expr) -> int:
    return node.end_lineno or node.lineno


def _scope(file: str, code: CodeType) -> ast.AST:
    """Return the function, or the module, that is running."""
    tree = _tree(file)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    named = [node for node in functions if node.name == code.co_name and _holds(node, code.co_firstlineno)]
    return named[-1] if named else tree


def _tree(file: str) -> ast.AST:
    """Return a script's syntax; an empty module where there is no source."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ast.Module([], [])


def _holds(node: ast.stmt, line: int) -> bool:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(each.lineno for each in decorators)])
    return first <= line <= _end(node)


def _within(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements and expressions of a function or a module, outermost first, but not of functions in it."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, _SCOPES):
            yield from _within(node)


def _leading_to(scope: ast.AST, line: int) -> Iterator[ast.AST]:
    """Yield what :func:`_within` does, without the branches of conditions that exclude the one with the line."""
    children = list(ast.iter_child_nodes(scope))
    if isinstance(scope, ast.If):
        arms = [scope.body, scope.orelse]
        there = [arm for arm in arms if any(_holds(node, line) for node in arm)]
        children = [scope.test, *(node for arm in there or arms for node in arm)]
    for node in children:
        yield node
        if not isinstance(node, _SCOPES):
            yield from _leading_to(node, line)


def _assignments(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names that a statement assigns, each with its value, or with that of the whole statement."""
    if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
        return
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        if isinstance(target, ast.Name):
            yield target.id, node.value
        elif isinstance(target, ast.Tuple):
            given = node.value.elts if isinstance(node.value, ast.Tuple) else []
            values = given if len(given) == len(target.elts) else [node.value] * len(target.elts)
            named = zip(target.elts, values, strict=True)
            yield from ((each.id, value) for each, value in named if isinstance(each, ast.Name))


def _is_container(value: ast.expr) -> bool:
    """Return whether an expression is an empty list or dict: ``append`` and ``update`` of others may do anything."""
    return isinstance(value, ast.List | ast.Dict) and not ast.unparse(value).strip("[]{}")


def _is_carried(loop: ast.For | ast.While, name: str, *, grows: bool) -> bool:
    """Return whether the body of a loop changes a variable, and reads what the iteration before has left in it."""
    if any(_is_advance(node, name) for node in _within(loop)):
        return True
    nodes = [node for node in _within(loop) if _names(node, name)]
    if not any(_is_change(node, name) and (grows or not _is_growth(node, name)) for node in nodes):
        return False
    given: set[ast.AST] = set()
    for inner in [loop, *(node for node in _within(loop) if isinstance(node, _LOOPS))]:
        assigned = next((each for each in _unconditional(inner) if name in _assigned(each)), None)
        if assigned is not None:
            given.update(node for node in ast.walk(inner) if not _comes_before(node, assigned))
    return any(_is_read(node) for node in nodes if node not in given)


def _names(node: ast.AST, name: str) -> bool:
    """Return whether a node is the variable, ``name += ...``, or a call of one of its methods."""
    if isinstance(node, ast.AugAssign):
        return isinstance(node.target, ast.Name) and node.target.id == name
    return (isinstance(node, ast.Name) and node.id == name) or _is_growth(node, name)


def _is_advance(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node).startswith((f"next({name})", f"next({name}, "))


def _is_growth(node: ast.AST, name: str) -> bool:
    grows = (f"{name}.append", f"{name}.extend", f"{name}.update")
    return isinstance(node, ast.Call) and ast.unparse(node.func) in grows


def _is_change(node: ast.AST, name: str) -> bool:
    return _is_growth(node, name) or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))


def _is_read(node: ast.AST) -> bool:
    return isinstance(node, ast.AugAssign) or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))


def _unconditional(loop: ast.For | ast.While | ast.With) -> Iterator[ast.stmt]:
    """Yield the statements that run in each iteration of a loop, and the loop itself for the names of its head."""
    yield loop
    for node in loop.body:
        yield from _unconditional(node) if isinstance(node, ast.With) else [node]


def _assigned(node: ast.stmt) -> set[str]:
    """Return the names that a statement gives a value."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign | ast.For):
        targets = [node.target]
    return {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}


def _comes_before(node: Any, assigned: Any) -> bool:
    """Return whether a node is evaluated before a statement assigns: it precedes it, or is within its value."""
    if isinstance(assigned, ast.For | ast.While):
        return False
    if not hasattr(node, "lineno"):  # an operator, for example
        return False
    within = any(each is node for each in ast.walk(assigned.value))
    return within or bool((node.lineno, node.col_offset) < (assigned.lineno, assigned.col_offset))

"""Variables that a script carries from one step to the next, such as a patience: nobody saves them.

The source of the loop says which they are: names that have a value before it, and that its body reads and changes.
"""

from __future__ import annotations

import ast
import enum
import functools
import gc
import itertools
import linecache
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType, GeneratorType
from typing import Any

from resume_adapters.core.observed.paths import is_module
from resume_adapters.core.observed.walk import CODE, is_trained
from resume_adapters.core.state.untouched import attributes, has_attributes, is_a

PACKAGE = str(Path(__file__).parents[2])

_NOT_THE_SCRIPT = (PACKAGE, str(Path(ast.__file__).parent), "<")
"""How the files of this package and of Python begin, and what has no file."""

_INSTALLED = {"site-packages", "dist-packages"}
"""Where packages are installed; the latter by Debian, and in the images of many clouds."""

_CLOCKS = ("time.", "time(", "perf_counter", "monotonic", "now(")
"""What is in an expression that asks for the time."""

EPOCHS = (".epochs(",)
"""What is in the head of a loop over the epochs of a run."""

_OF_THE_RUN = (".global_step", ".resume(", ".batches(", ".steps(", *EPOCHS)
"""What is in an expression that has another value where a run goes on."""

_LOOPS = (ast.For, ast.While)

_DEEP = 4
"""Iterators through which batches are handed on."""

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


@dataclass(frozen=True)
class Place:
    """A call that is running in the script.

    Attributes:
        code: what is running.
        line: the line at which it is.
        data: the variables that hold data now.
    """

    code: CodeType
    line: int
    data: frozenset[str]


def calling_script() -> list[Place]:
    """Return where the script is now, innermost call first."""
    found = []
    for frame in script_frames():
        held = frame.f_locals
        data = frozenset(name for name, value in held.items() if _is_data(value))
        found.append(Place(frame.f_code, frame.f_lineno, data))
        release(held, frame.f_code)
    return found


def script_frames() -> list[FrameType]:
    """Return the calls of the script that are running now, innermost first, then its generators that hand on batches.

    These wait within a loop of theirs, and may keep something from one batch to the next as any other call may.
    """
    running = traceback.walk_stack(sys._getframe(1))
    found = [frame for frame, _ in running if is_of_script(frame.f_code.co_filename)]
    for each in found:
        held = each.f_locals
        values = [*held.values()]
        release(held, each.f_code)
        values += [inner for own in values if is_code_of_script(type(own)) for inner in attributes(own).values()]
        inner = [it.gi_frame for value in values for it in handing_on(value) if is_a(it, GeneratorType)]
        found += [it for it in inner if it and it not in found and is_of_script(it.f_code.co_filename)]
    return found


def release(held: Any, code: CodeType) -> None:
    """Empty the copy that Python before 3.13 keeps of a function's variables once they were looked at.

    Else the batch and the outputs of this step stay in memory for the life of the function. A script that holds the
    copy itself, by ``locals()``, keeps it.
    """
    of_frame_and_callers = 4
    if isinstance(held, dict) and code.co_flags & CO_OPTIMIZED and sys.getrefcount(held) == of_frame_and_callers:
        held.clear()


def carried(places: list[Place]) -> list[str]:
    """Return the variables that the loops around these places carry from step to step, each with its file and line."""
    return list(dict.fromkeys(name for place in places for name in _carried_at(place)))


def of_the_run(places: list[Place]) -> set[str]:
    """Return the names of variables and attributes to which the script gives values that follow from the run."""
    return {name for file in {place.code.co_filename for place in places} for name in _of_the_run_in(file)}


@functools.lru_cache(maxsize=8)
def _of_the_run_in(file: str) -> frozenset[str]:
    nodes = list(ast.walk(_tree(file)))
    given = [(node.value, each) for node in nodes if isinstance(node, ast.Assign) for each in node.targets]
    given += [(node.iter, node.target) for node in nodes if isinstance(node, ast.For)]
    follows = [target for value, target in given if any(word in ast.unparse(value) for word in _OF_THE_RUN)]
    return frozenset(ast.unparse(each).rpartition(".")[2] for each in follows)


def is_within_range(places: list[Place]) -> bool:
    """Return whether the script is in a loop over ``range()``, which starts at 0 in a resumed epoch."""
    around = over(itertools.chain(*(reversed(loops_around(scope_of(at.code), at.line)) for at in places)))
    inner = list(itertools.takewhile(lambda each: not over([each], EPOCHS), around))
    names = "|".join(map(re.escape, of_the_run(places))) or "(?!)"
    told = re.compile(rf"\.batches|range\([^,()]*\b({names})\b[^,()]*,")  # from where the run is, or a variable says
    is_told = any(told.search(ast.unparse(each.iter)) for each in inner)
    return 0 < len(inner) < len(around) and over(inner, ("range(",)) == inner and not is_told


def over(loops: Iterable[ast.For | ast.While], words: tuple[str, ...] = ("",)) -> list[ast.For]:
    """Return the loops over something whose source has one of some words; by default those over anything."""
    return [one for one in loops if isinstance(one, ast.For) and any(word in ast.unparse(one.iter) for word in words)]


@functools.lru_cache(maxsize=1 << 14)
def is_of_script(file: str) -> bool:
    """Return whether a file is of the script: neither of Python, nor of this package, nor of one that is installed."""
    return not file.startswith(_NOT_THE_SCRIPT) and _INSTALLED.isdisjoint(Path(file).parts)


def is_code_of_script(each: Any) -> bool:
    """Return whether a class or a function is of the script."""
    return is_of_script(_file_of(each))


def _file_of(each: Any) -> str:
    return getattr(sys.modules.get(getattr(each, "__module__", None) or ""), "__file__", None) or "<"


@functools.lru_cache(maxsize=64)  # asked for the same places at each look
def rebound(code: CodeType, line: int) -> frozenset[str] | None:
    """Return the names to which a step of the loops around a line gives values; ``None`` where there is no source."""
    if not linecache.getlines(code.co_filename):
        return None
    loops = loops_around(scope_of(code), line)
    return frozenset(name for loop in loops for node in within(loop) for name in _stored(node))


def _carried_at(place: Place) -> Iterator[str]:
    scope = scope_of(place.code)
    loops = loops_around(scope, place.line)
    if not loops:
        return
    run = _receiver(loops[-1], place.line)
    values: dict[str, ast.expr] = {}
    found: dict[tuple[str, int], int | None] = {}  # by the name and how many loops are around the place
    for node, line in before(loops[-1], scope, place.line):
        for name, value in assignments(node):
            values[name] = value
            around = [loop for loop in loops if loop.lineno > line]
            if not _begins_again(value, run, values):
                found[name, len(around)] = None
            elif name in place.data and any(_is_carried(loop, name) for loop in around):
                found.setdefault((name, len(around)), line)
    yield from (shown(name, place.code, line) for (name, _), line in found.items() if line is not None)


def handing_on(value: Any, depth: int = _DEEP) -> list[Any]:
    """Return the iterators through which one hands on a run's batches, itself first; none where it gives anything else.

    After a resume, it goes on where the run does.
    """
    is_generator = is_a(value, GeneratorType)
    file = value.gi_code.co_filename if is_generator else _file_of(type(value))
    if file.startswith(PACKAGE):
        return [value]
    if not (is_generator or type(value) in (map, zip)) or not depth:
        return []
    held = gc.get_referents(value)
    held += [inner for each in held if type(each) is tuple for inner in each]  # ``zip`` has one
    found = [handing_on(each, depth - 1) for each in held if is_a(each, Iterator)]
    return [value, *itertools.chain(*found)] if found and all(found) else []


def _is_data(value: Any) -> bool:
    """Return whether a value is data, or code that is chosen, or gives data that nobody goes on with."""
    if is_a(value, Iterator):  # into an object of the script ``variables.py`` looks
        return not handing_on(value) and not (has_attributes(value) and is_code_of_script(type(value)))
    kinds = (int, float, complex, str, bytes, type(None), list, tuple, dict, set, enum.Enum, functools.partial)
    return (
        is_a(value, *kinds, *CODE) or hasattr(type(value), "__array__") or (is_module(value) and not is_trained(value))
    )


def _receiver(loop: ast.AST, line: int) -> str:
    """Return how the script writes the run whose method it calls at a line; nothing where it calls another function."""
    calls = [node for node in within(loop) if isinstance(node, ast.Call) and node.lineno <= line <= _end(node)]
    steps = [each.func for each in calls if isinstance(each.func, ast.Attribute) and each.func.attr == "step"]
    return ast.unparse(steps[0].value) if steps else ""


def _begins_again(value: ast.expr, run: str, values: dict[str, ast.expr]) -> bool:
    """Return whether a variable has the same value at the start of each launch: none that follows from the run."""
    words = [value, *(values[each.id] for each in ast.walk(value) if isinstance(each, ast.Name) and each.id in values)]
    varying = (*_CLOCKS, *_OF_THE_RUN, *([f"{run}."] if run else []))
    return not any(word in ast.unparse(each) for each in words for word in varying)


def _end(node: ast.stmt | ast.expr) -> int:
    return node.end_lineno or node.lineno


def scope_of(code: CodeType) -> ast.AST:
    """Return the function, or the module, that is running."""
    functions = _functions(code.co_filename)
    named = [node for node in functions if node.name == code.co_name and _holds(node, code.co_firstlineno)]
    return named[-1] if named else _tree(code.co_filename)


def loops_around(scope: ast.AST, line: int) -> list[ast.For | ast.While]:
    """Return the loops of a function or a module around a line, outermost first."""
    return [node for node in within(scope) if isinstance(node, _LOOPS) and _holds(node, line)]


@functools.lru_cache(maxsize=8)
def _tree(file: str) -> ast.AST:
    """Return a script's syntax; an empty module where there is no source."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ast.Module([], [])


@functools.lru_cache(maxsize=8)
def _functions(file: str) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(_tree(file)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def _holds(node: ast.stmt, line: int) -> bool:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(each.lineno for each in decorators)]) <= line <= _end(node)


def within(scope: ast.AST, line: int = 0) -> Iterator[ast.AST]:
    """Yield the statements and expressions of a function or a module, outermost first, but not of functions in it.

    Args:
        line: leave out the branches of conditions that exclude the one with this line.
    """
    children = list(ast.iter_child_nodes(scope))
    if line and isinstance(scope, ast.If):
        arms = [scope.body, scope.orelse]
        there = [arm for arm in arms if any(_holds(node, line) for node in arm)]
        children = [scope.test, *(node for arm in there or arms for node in arm)]
    for node in children:
        yield node
        if not isinstance(node, _SCOPES):
            yield from within(node, line)


def before(loop: ast.For | ast.While, scope: ast.AST, line: int) -> Iterator[tuple[ast.AST, int]]:
    """Yield what is before a loop, each with its line: of a scope, but for branches that exclude a line."""
    for node in within(scope, line):
        begins = getattr(node, "lineno", loop.lineno)
        if begins < loop.lineno:
            yield node, begins


def shown(name: str, code: CodeType, line: int) -> str:
    """Return a variable as a user is told of it: its name, and the file and line that give it a value."""
    return f"`{name}` ({Path(code.co_filename).name}:{line})"


def assignments(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names that a statement assigns, each with its value, or with that of the whole statement."""
    if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
        return
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        targets = target.elts if isinstance(target, ast.Tuple) else [target]
        given = node.value.elts if isinstance(node.value, ast.Tuple) else []
        values = given if len(given) == len(targets) else [node.value] * len(targets)
        named = zip(targets, values, strict=True)
        yield from ((each.id, value) for each, value in named if isinstance(each, ast.Name))


def _is_carried(loop: ast.For | ast.While, name: str) -> bool:
    """Return whether the body of a loop changes a variable, and reads what the iteration before has left in it."""
    nodes = list(within(loop))
    calls = [ast.unparse(node) for node in nodes if isinstance(node, ast.Call)]
    if any(each.startswith((f"next({name})", f"next({name},")) for each in calls):  # it takes the next of an iterator
        return True
    if not any(name in _stored(node) for node in nodes):
        return False
    given: set[ast.AST] = set()
    for inner in [loop, *(node for node in within(loop) if isinstance(node, _LOOPS))]:
        assigned = next((each for each in _unconditional(inner) if name in _assigned(each)), None)
        if assigned is not None:
            given.update(node for node in ast.walk(inner) if not _comes_before(node, assigned))
    return any(_is_read(node, name) for node in nodes if node not in given)


def _stored(node: ast.AST) -> list[str]:
    return [node.id] if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else []


def _is_read(node: ast.AST, name: str) -> bool:
    """Return whether a node is the variable where it is read, or ``name += ...``."""
    if isinstance(node, ast.AugAssign):
        return isinstance(node.target, ast.Name) and node.target.id == name
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id == name


def _unconditional(loop: ast.For | ast.While | ast.With) -> Iterator[ast.stmt]:
    """Yield the statements that run in each iteration of a loop, and the loop itself for the names of its head."""
    yield loop
    for node in loop.body:
        yield from _unconditional(node) if isinstance(node, ast.With) else [node]


def _assigned(node: ast.stmt) -> set[str]:
    """Return the names that a statement gives a value, but for those within its body."""
    heads: list[ast.AST] = [node.target] if isinstance(node, ast.For) else []
    heads += [node] if isinstance(node, ast.Assign | ast.AnnAssign) else []
    return {name for head in heads for each in ast.walk(head) for name in _stored(each)}


def _comes_before(node: Any, assigned: Any) -> bool:
    """Return whether a node is evaluated before a statement assigns: it precedes it, or is within its value."""
    if isinstance(assigned, _LOOPS) or not hasattr(node, "lineno"):  # an operator, for example
        return False
    within = any(each is node for each in ast.walk(assigned.value))
    return within or bool((node.lineno, node.col_offset) < (assigned.lineno, assigned.col_offset))

"""Variables that a script carries from one step to the next, such as a patience: nobody saves them.

The source of the loop says which they are: names that have a constant before it, and that its body reads and changes.
"""

from __future__ import annotations

import ast
import linecache
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

_NOT_THE_SCRIPT = (str(Path(__file__).parents[2]), sysconfig.get_paths()["stdlib"], "<")
"""How the files of this package and of Python begin, and what has no file."""

_LOOPS = (ast.For, ast.While)

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


@dataclass(frozen=True)
class Place:
    """A call that is running in the script.

    Attributes:
        code: what is running.
        line: the line at which it is.
    """

    code: CodeType
    line: int


def calling_script() -> list[Place]:
    """Return where the script is now, innermost call first."""
    found = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_NOT_THE_SCRIPT) and "site-packages" not in Path(file).parts:
            found.append(Place(frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return found


def carried(places: list[Place]) -> list[str]:
    """Return the variables that the loops around these places carry from step to step, each with its file and line."""
    return list(dict.fromkeys(name for place in places for name in _carried_at(place)))


def _carried_at(place: Place) -> Iterator[str]:
    file = place.code.co_filename
    scope = _scope(file, place.code)
    loops = [node for node in _within(scope) if isinstance(node, _LOOPS) and _holds(node, place.line)]
    if not loops:
        return
    innermost = loops[-1]
    constants = {name: line for node in _within(scope) for name, line in _constants(node) if line < innermost.lineno}
    for name, line in constants.items():
        if any(_is_carried(loop, name) for loop in loops if loop.lineno > line):
            yield f"`{name}` ({Path(file).name}:{line})"


def _scope(file: str, code: CodeType) -> ast.AST:
    """Return the function, or the module, that is running; an empty module where there is no source."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ast.Module([], [])
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    named = [node for node in functions if node.name == code.co_name and _holds(node, code.co_firstlineno)]
    return named[-1] if named else tree


def _holds(node: ast.stmt, line: int) -> bool:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(each.lineno for each in decorators)])
    return first <= line <= (node.end_lineno or first)


def _within(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements and expressions of a function or a module, outermost first, but not of functions in it."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, _SCOPES):
            yield from _within(node)


def _constants(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the names that a statement gives a constant, each with its line."""
    if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
        return
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        pairs = [(target, node.value)]
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = list(zip(target.elts, node.value.elts, strict=False))
        for name, value in pairs:
            if isinstance(name, ast.Name) and _is_constant(value):
                yield name.id, node.lineno


def _is_constant(value: ast.expr) -> bool:
    """Return whether an expression is a number, ``None`` or the like, ``float("inf")``, or an empty container."""
    if isinstance(value, ast.UnaryOp):
        return _is_constant(value.operand)
    if isinstance(value, ast.Call):
        return ast.unparse(value.func) in ("float", "int") and all(map(_is_constant, value.args))
    if isinstance(value, ast.List | ast.Tuple | ast.Set):
        return not value.elts
    if isinstance(value, ast.Dict):
        return not value.keys
    return isinstance(value, ast.Constant) or ast.unparse(value) in ("math.inf", "np.inf", "torch.inf", "inf")


def _is_carried(loop: ast.For | ast.While, name: str) -> bool:
    """Return whether the body of a loop changes a variable, and reads what the iteration before has left in it."""
    nodes = [node for node in _within(loop) if _names(node, name)]
    if not any(_is_change(node, name) for node in nodes):
        return False
    assigned = next((each for each in _unconditional(loop) if name in _assigned(each)), None)
    reads = [node for node in nodes if _is_read(node, name)]
    return any(assigned is None or _comes_before(node, assigned) for node in reads)


def _names(node: ast.AST, name: str) -> bool:
    """Return whether a node is the variable, ``name += ...``, or a call of one of its methods."""
    if isinstance(node, ast.AugAssign):
        return isinstance(node.target, ast.Name) and node.target.id == name
    return (isinstance(node, ast.Name) and node.id == name) or _is_growth(node, name)


def _is_growth(node: ast.AST, name: str) -> bool:
    grows = (f"{name}.append", f"{name}.extend", f"{name}.update")
    return isinstance(node, ast.Call) and ast.unparse(node.func) in grows


def _is_change(node: ast.AST, name: str) -> bool:
    return _is_growth(node, name) or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))


def _is_read(node: ast.AST, name: str) -> bool:
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
    within = any(each is node for each in ast.walk(assigned.value))
    return within or bool((node.lineno, node.col_offset) < (assigned.lineno, assigned.col_offset))

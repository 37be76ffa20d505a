"""Every wait of a block has a limit: this lists them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from resume_adapters.core import devices, recovery

MODULES = [*sorted(Path(recovery.__file__).parent.glob("*.py")), Path(devices.__file__)]

WAITS = {"wait", "wait_for", "join", "acquire", "result", "communicate"}
"""Methods that wait for as long as they are told, and else for ever."""

ENDLESS = {"recv", "accept", "waitpid", "waitid", "barrier", "monitored_barrier", "select", "getresponse"}
"""Calls that no limit can be given to, or that nobody here gives one to."""

LIMITED = {
    "devices.py: thread.join(seconds)",
    "groups.py: _dropping.acquire(timeout=_LONGEST_DROP)",
    "watch.py: self._over.wait(_LOOK_EVERY)",
    "watch.py: self._thread.join(self._limit)",
}


def calls(module: Path) -> Iterator[tuple[ast.Call, str]]:
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Call):
            yield node, node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def is_of_text(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Constant)


def test_each_wait_is_told_how_long_it_may_take() -> None:
    found = {
        f"{module.name}: {ast.unparse(call)}"
        for module in MODULES
        for call, name in calls(module)
        if name in WAITS and not is_of_text(call)
    }
    assert found == LIMITED


def test_nothing_waits_that_cannot_be_told() -> None:
    found = [(module.name, ast.unparse(call)) for module in MODULES for call, name in calls(module) if name in ENDLESS]
    assert not found


def test_what_is_in_the_launchers_store_is_read_in_one_module_that_does_not_wait_for_it() -> None:
    readers = {
        module.name
        for module in MODULES
        for call, name in calls(module)
        if name == "get" and isinstance(call.func, ast.Attribute) and "native" in ast.unparse(call.func.value)
    }
    makers = {module.name for module in MODULES for _, name in calls(module) if name == "TCPStore"}
    assert readers == makers == {"meeting.py"}
    (source,) = [module.read_text() for module in MODULES if module.name == "meeting.py"]
    (line,) = [each for each in source.splitlines() if "native.get" in each]
    assert "if self.native.check([key])" in line and "timedelta(seconds=seconds)" in source


def test_each_loop_that_sleeps_ends() -> None:
    for module in MODULES:
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.FunctionDef):
                whiles = [ast.unparse(each) for each in ast.walk(node) if isinstance(each, ast.While)]
                sleeps = any("sleep" in each for each in whiles)
                assert not sleeps or "monotonic" in ast.unparse(node), (module.name, node.name)

"""What the package asks of an accelerator, on the test device."""

from __future__ import annotations

import ast
import signal
from pathlib import Path

import pytest

from device.compiled import DEVICE, NAME, require_device

from launch import Outcome, Server

CASES = Path(__file__).with_name("cases.py")
SAID = {
    "the_checkpoint_is_of_another_kind_of_device": "saved on cuda and is resumed on walled",
    "the_checkpoint_is_of_no_device": "saved on cpu and is resumed on walled",
    "a_generator_is_of_another_kind_of_device": "saved on cpu and is resumed on walled",
}
"""What these cases say, once; the others say nothing."""

FATAL = "its_memory_is_not_the_hosts"


def names() -> list[str]:
    functions = [node for node in ast.parse(CASES.read_text()).body if isinstance(node, ast.FunctionDef)]
    return [each.name for each in functions if not each.args.args and each.name != FATAL]


def run(name: str, server: Server, directory: Path) -> Outcome:
    if DEVICE != NAME:
        pytest.skip("it is about the tests' own device")
    require_device()
    return server.start(CASES, [name], directory, 1, {}).wait()


@pytest.mark.parametrize("name", names())
def test_on_the_device(name: str, server: Server, tmp_path: Path) -> None:
    outcome = run(name, server, tmp_path).require_success()
    said = [line for line in outcome.output.splitlines() if "resume-adapters: " in line]
    assert len(said) == (name in SAID) and SAID.get(name, "") in "".join(said), outcome.output


def test_who_reads_its_memory_dies(server: Server, tmp_path: Path) -> None:
    """Else the laws would show nothing of code that takes each tensor for the host's."""
    assert run(FATAL, server, tmp_path).statuses == (-signal.SIGSEGV,)

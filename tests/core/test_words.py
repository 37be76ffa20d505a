"""The words that the package uses: one verb for an act, and sentences that one would say to a colleague."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import resume_adapters

PACKAGE = Path(resume_adapters.__file__).parent
SENTENCES = re.compile(
    r"\b(anew|whoever|another number of|stands before|put back|take up|bring to|heeds?|adopts?)\b", re.I
)
NAMES = {
    "Agreement", "Alone", "Committer", "Heartbeat", "Lifecycle", "Reserve", "Several", "adopt", "by_all", "by_node",
    "carries_windows", "heed", "in_window", "put_back", "settle", "step_aside", "twin",
}  # fmt: skip
"""Names that a former version had; each has a word of the field now."""


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: file.relative_to(PACKAGE).as_posix())
def test_no_former_word_is_used(file: Path) -> None:
    text = file.read_text()
    assert not [line for line in text.splitlines() if SENTENCES.search(line)]
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    defined = {node.name.strip("_") for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)}
    assert not defined & NAMES

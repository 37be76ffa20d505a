"""Print how large the package is: ``python tools/size.py``; with ``--trace``, also what a save and a start enter.

A line of code is a line that is neither blank nor only a comment nor part of a docstring. The table is the same on any
machine; the trace needs transformers.
"""

from __future__ import annotations

import argparse
import ast
import io
import statistics
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "resume_adapters"
PROTOCOLS = {"Framework": "core/session/framework.py", "LoopFramework": "core/loop/framework.py"}

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DOCUMENTED = (ast.Module, ast.ClassDef, *_FUNCTIONS)


def code_lines(text: str) -> set[int]:
    """Return the numbers of the lines that are code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, (ast.Module, ast.ClassDef, *_FUNCTIONS))
            and ast.get_docstring(node, clean=False) is not None
        ):
            lines.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return lines


def package_of(file: Path) -> str:
    """Return the package whose budget a file counts for: ``core/state``, ``hf``, ``cli``; the root is ``.``."""
    folders = file.relative_to(PACKAGE).parts[:-1]
    return "/".join(folders[:2] if folders[:1] in (("core",), ("integrations",)) else folders[:1]) or "."


def sources(directory: Path = PACKAGE) -> list[Path]:
    """Return the files of a directory and of those below it."""
    return sorted(directory.rglob("*.py"))


def code_by_package() -> dict[str, int]:
    """Return the lines of code of each package, by its name."""
    count: Counter[str] = Counter()
    for file in sources():
        count[package_of(file)] += len(code_lines(file.read_text()))
    return dict(sorted(count.items()))


def function_lengths() -> list[int]:
    """Return the lines of code of each function, with its signature and the functions within it."""
    lengths = []
    for file in sources():
        text = file.read_text()
        code = code_lines(text)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, _FUNCTIONS):
                lengths.append(len(code & set(range(node.lineno, (node.end_lineno or 0) + 1))))
    return lengths


def members(protocol: str) -> list[str]:
    """Return the public methods and properties of a class of :data:`PROTOCOLS`, in its order."""
    tree = ast.parse((PACKAGE / PROTOCOLS[protocol]).read_text())
    (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == protocol)
    return [node.name for node in body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]


def constructors() -> list[tuple[int, str]]:
    """Return each constructor's number of arguments with its class, most first."""
    found = []
    for file in sources():
        classes = (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ClassDef))
        for node in classes:
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    given = [*method.args.posonlyargs, *method.args.args, *method.args.kwonlyargs]
                    found.append((len(given) - 1, node.name))
    return sorted(found, reverse=True)


def import_circles() -> list[list[str]]:
    """Return the groups of modules of which each imports each other, at the top of a file or in a function."""
    names = {".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts): file for file in sources()}
    modules = {name.removesuffix(".__init__"): file for name, file in names.items()}
    graph = {name: set(_imported(file, modules)) - {name} for name, file in modules.items()}
    reached = {name: _reachable(graph, name) for name in graph}
    circles = {frozenset(other for other in reached[name] if name in reached[other]) for name in graph}
    return sorted(sorted(circle) for circle in circles if len(circle) > 1)


def _imported(file: Path, modules: dict[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                name = whole if whole in modules else str(node.module)
                if name in modules:
                    yield name


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    seen, todo = set(), [start]
    while todo:
        for other in graph[todo.pop()] - seen:
            seen.add(other)
            todo.append(other)
    return seen


def table() -> Iterator[tuple[str, str]]:
    """Yield the rows: what is measured, and how much of it there is."""
    texts = [file.read_text() for file in sources()]
    lengths, built = function_lengths(), constructors()
    short = sum(length <= 3 for length in lengths)
    yield "lines of code in src", f"{sum(code_by_package().values()):,}"
    yield "files in src", str(len(texts))
    yield "all lines of src", f"{_lines(sources()):,}"
    yield "all lines of tests", f"{_lines(sources(ROOT / 'tests')):,}"
    words = sum(len(page.read_text().split()) for page in sorted((ROOT / "docs").glob("*.md")))
    yield "words in docs", f"{words:,}"
    yield "functions; of at most three lines", f"{len(lengths):,}; {short:,}"
    yield "median of a function's lines", f"{statistics.median(lengths):g}"
    for protocol in PROTOCOLS:
        yield f"members of {protocol}", str(len(members(protocol)))
    yield "most arguments of a constructor", f"{built[0][0]} ({built[0][1]})"
    yield "marked private seams", str(sum(text.count("# seam:") for text in texts))
    yield "circles of imports", str(len(import_circles()))


def _lines(files: Iterable[Path]) -> int:
    return sum(len(file.read_text().splitlines()) for file in files)


_JOB = '''
import os, sys, threading
from pathlib import Path
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
import resume_adapters
from resume_adapters.hf import ResumeCallback

package = str(Path(resume_adapters.__file__).parent)
thread = threading.get_ident()
entered, functions, above, is_on = set(), set(), 0, False

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 1)
    def forward(self, x):
        return {"loss": self.linear(x).pow(2).mean()}

def enter(frame, event, _):
    global above
    if not is_on or event != "call" or threading.get_ident() != thread:
        return
    code = frame.f_code
    if code.co_filename.startswith(package):
        entered.add(code.co_filename)
        functions.add(code)
    elif (code.co_name, Path(code.co_filename).parent.name) in (("save", "torch"), ("save_file", "safetensors")):
        ours = 0
        while frame is not None:
            ours += frame.f_code.co_filename.startswith(package)
            frame = frame.f_back
        above = max(above, ours)

class Watch(TrainerCallback):
    """Measures from where a step ends to where its save has returned, or from the start to the first step."""
    def on_step_begin(self, args, state, control, **kwargs):
        global is_on
        if is_on:
            is_on = False
            print(len(entered), len(functions), flush=True)
            os._exit(0)
    def on_step_end(self, args, state, control, **kwargs):
        global is_on
        if state.global_step == 8:
            entered.clear(); functions.clear()
            is_on = True
    def on_save(self, args, state, control, **kwargs):
        global is_on
        if is_on:
            is_on = False
            print(len(entered), len(functions), above, flush=True)
            os._exit(0)

arguments = TrainingArguments("out", max_steps=100, save_steps=2, save_strategy="steps", logging_strategy="no",
    report_to="none", disable_tqdm=True, use_cpu=True, remove_unused_columns=False)
rows = [{"x": torch.full((8,), float(at))} for at in range(64)]
# A save begins behind the callbacks of a step, and ends before those that come behind ours.
callbacks = [ResumeCallback(), Watch()]
trainer = Trainer(Model(), arguments, train_dataset=rows, callbacks=callbacks)
is_on = sys.argv[1] == "start"
sys.setprofile(enter)
trainer.train()
'''


def trace(directory: Path) -> Iterator[tuple[str, str]]:
    """Yield what the fourth save of ``Linear(8, 1)`` in the Trainer enters of this package, and a start that resumes.

    Only the thread that trains counts.

    Args:
        directory: an empty directory, for the run.
    """
    for name in ("save", "start"):
        command = [sys.executable, "-c", _JOB, name]
        found = (
            subprocess.run(command, cwd=directory, check=True, capture_output=True, text=True)
            .stdout.splitlines()[-1]
            .split()
        )
        yield f"files and functions that a {name} enters", f"{found[0]}; {found[1]}"
        if name == "save":
            yield "frames of ours above the Trainer's write", found[2]


def main() -> None:
    """Print the table, and what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", action="store_true", help="also train twice with the Trainer, which takes a minute")
    parser.add_argument("--packages", action="store_true", help="also print the lines of code of each package")
    given = parser.parse_args()
    rows = [*table()]
    if given.packages:
        rows += [(f"  {name}", f"{lines:,}") for name, lines in code_by_package().items()]
    if given.trace:
        import tempfile

        with tempfile.TemporaryDirectory() as directory:
            rows += trace(Path(directory))
    for name, value in rows:
        print(f"{name:42}{value:>24}")


if __name__ == "__main__":
    main()

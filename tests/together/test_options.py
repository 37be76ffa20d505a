"""An option is the same wherever it is given: its name, default, type and meaning, and the values that are refused."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from pathlib import Path

import pytest

import resume_adapters

from launch import Server

PACKAGE = Path(resume_adapters.__file__).parent
TAKES = {
    "hf": "ResumeCallback",
    "lightning": "ResumeCallback",
    "accelerate": "register_for_resume",
    "deepspeed": "ResumeHooks",
}
FILES = {"hf": "callback.py", "lightning": "callback.py", "accelerate": "__init__.py", "deepspeed": "__init__.py"}
MODULES = {"hf": "transformers"}
OPTIONS = (
    "resume",
    "keep",
    "stop",
    "save_every",
    "mtbf",
    "verify",
    "on_batch_change",
    "on_save_error",
    "stage",
    "mirror",
)
"""What every adapter takes, in this order."""

OF_DIRECTORIES = ["run_dir"]
"""What every adapter takes in addition but Lightning's, where each ModelCheckpoint has a directory."""


def defined(file: Path, name: str) -> ast.FunctionDef | ast.ClassDef:
    """Return the definition of a class or a function in a module."""
    found = next(node for node in ast.parse(file.read_text()).body if getattr(node, "name", "") == name)
    assert isinstance(found, ast.FunctionDef | ast.ClassDef)
    return found


SHARED = PACKAGE / "core" / "session" / "options.py"


def taker(adapter: str) -> tuple[ast.FunctionDef, str]:
    """Return the function that takes an adapter's options, and the docstring that says what is special about them."""
    found = function = defined(PACKAGE / adapter / FILES[adapter], TAKES[adapter])
    if isinstance(found, ast.ClassDef):
        bases = [ast.unparse(each) for each in found.bases]
        owner = defined(SHARED, "OptionsCallback") if "OptionsCallback" in bases else found
        own = [node for node in found.body if getattr(node, "name", "") == "__init__"]
        function = next(iter(own), None) or next(node for node in owner.body if getattr(node, "name", "") == "__init__")
    assert isinstance(function, ast.FunctionDef)
    return function, ast.get_docstring(found) or ""


def signature(adapter: str) -> dict[str, tuple[str, str]]:
    """Return the type and the default of each keyword."""
    arguments = taker(adapter)[0].args
    assert arguments.kwarg is not None and arguments.kwarg.arg == "parts"
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return {each.arg: (ast.unparse(each.annotation), ast.unparse(default)) for each, default in pairs}


def documented(text: str) -> list[str]:
    """Return what a docstring documents, in its order."""
    return re.findall(r"^ +(\w+): ", re.split(r"Args:|Attributes:", text)[1].partition("Raises:")[0], re.M)


def rows(adapter: str) -> dict[str, str]:
    """Return what the table of an adapter's page says that each option means, in its order."""
    page = (Path(__file__).parents[2] / "docs" / f"{adapter}.md").read_text()
    table = page.partition("\n## Options\n")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \| [^|]* \| (.*) \|$", table, re.M))


@pytest.mark.parametrize("adapter", TAKES)
def test_an_adapter_takes_every_option_and_no_other(adapter: str) -> None:
    assert [name for name in signature(adapter) if name not in OF_DIRECTORIES] == list(OPTIONS)
    assert [name for name in rows("hf") if name not in OF_DIRECTORIES] == list(OPTIONS), "in docs/hf.md"


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_has_the_same_type_and_default(option: str) -> None:
    assert len({signature(adapter)[option] for adapter in TAKES}) == 1


def test_the_meaning_of_every_option_is_told_in_one_place() -> None:
    """An adapter's docstring says where that is, and of an option only what its own default is."""
    assert documented(ast.get_docstring(defined(SHARED, "ResumeOptions")) or "") == [*OPTIONS, "parts"]
    for adapter in TAKES:
        text = taker(adapter)[1]
        assert "core.session.options.ResumeOptions`" in text
        assert [name for name in documented(text) if name in (*OPTIONS, "parts")] == ["keep", "save_every"], adapter


@pytest.mark.parametrize("adapter", [each for each in TAKES if each != "hf"])
def test_an_option_is_described_alike_on_every_page(adapter: str) -> None:
    """The Trainer's page has them all, and the others those whose default is another one."""
    own = {name: text for name, text in rows(adapter).items() if name not in OF_DIRECTORIES}
    assert own and own.items() <= rows("hf").items()


@pytest.mark.thorough
def test_the_same_values_are_refused_for_the_same_reasons(server: Server, tmp_path: Path) -> None:
    refused = {}
    for adapter in TAKES:
        if importlib.util.find_spec(MODULES.get(adapter, adapter)) is None:
            continue
        (tmp_path / adapter).mkdir()
        script = Path(__file__).with_name("options_job.py")
        server.start(script, [adapter], tmp_path / adapter, 1, {}).wait().require_success()
        refused[adapter] = json.loads((tmp_path / adapter / "refusals.json").read_text())
    for adapter, cases in refused.items():
        for case, refusal in cases.items():
            assert refusal is not None, f"{adapter} takes {case}"
            assert refusal == next(iter(refused.values()))[case], (adapter, case)

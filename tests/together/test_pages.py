"""The code and the commands of the pages work: every block is run.

All python blocks of a page run in one process, in their order, as a reader would type them. Of the shell blocks, the
lines that begin with ``resume-adapters`` run against a small run directory. A block that cannot run here stands behind
a comment ``<!-- not run: the reason -->``, which readers do not see.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import resume_adapters.data
from resume_adapters.core.run.run import ResumableRun
from resume_adapters.core.run_directory.status import RunState
from resume_adapters.core.state.stateful import StaticState

from launch import Server, is_installed
from miniature import GivenContent

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ADAPTERS = {
    "hf": "transformers",
    "lightning": "lightning",
    "accelerate": "accelerate",
    "deepspeed": "deepspeed",
    "fabric": "lightning",
}

_BLOCK = re.compile(r"(?P<kept><!-- not run: .+ -->\n+)?^ *```(?P<kind>\w+)\n(?P<code>.*?)^ *```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """A block of code: its first line's number in the page, counted from 0, and its text."""

    line: int
    code: str


def blocks(page: Path, kind: str) -> list[Block]:
    text = page.read_text()
    found = [each for each in _BLOCK.finditer(text) if each["kind"] == kind and each["kept"] is None]
    return [Block(text[: each.start("code")].count("\n"), each["code"]) for each in found]


def commands(page: Path) -> list[list[str]]:
    lines = [line for block in blocks(page, "sh") for line in block.code.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("resume-adapters ")]


def with_some(found: dict[Path, list[object]]) -> list[object]:
    return [pytest.param(page, id=page.stem) for page, what in found.items() if what]


@pytest.mark.parametrize("page", with_some({page: [*blocks(page, "python")] for page in PAGES}))
def test_the_python_of_a_page_runs(page: Path, server: Server, tmp_path: Path) -> None:
    script: list[str] = []
    for block in blocks(page, "python"):
        script += [""] * (block.line - len(script))  # so that a traceback has the line of the page
        script += block.code.splitlines()
    code = "\n".join(script)
    adapters = set(re.findall(r"from resume_adapters\.(\w+)", code)) & set(ADAPTERS)
    absent = [name for name in adapters if not is_installed(ADAPTERS[name])]
    if absent:
        pytest.skip(f"{', '.join(absent)} missing")
    if "deepspeed" in adapters:
        script[0] = "import training; training.deepspeed_on_cpu()"
    file = tmp_path / f"{page.stem}.py"
    file.write_text("\n".join(script))
    server.start(file, [], tmp_path, 1, {}).wait().require_success()


@pytest.mark.parametrize("page", with_some({page: [*commands(page)] for page in PAGES}))
def test_the_commands_of_a_page_work(page: Path, server: Server, tmp_path: Path) -> None:
    finished(tmp_path / "runs" / "a")
    script = tmp_path / "command.py"
    script.write_text("from resume_adapters.cli import main; main()")
    for words in commands(page):
        outcome = server.start(script, words, tmp_path, 1, {"COLUMNS": "80"}).wait()
        assert outcome.statuses == (0,), f"resume-adapters {shlex.join(words)}: {outcome.output}"


def finished(directory: Path) -> None:
    """Leave a finished run of three checkpoints."""
    run = ResumableRun(directory)
    run.open()
    for step in (500, 1000, 1500):
        content = GivenContent(
            lambda path: save_file({"weight": torch.zeros(2)}, path / "model.safetensors"),
            {"ema": StaticState({})},
            epoch=step / 500,
            metrics={"eval_loss": 1 / step},
        )
        run.saver.save(f"checkpoint-{step}", step, content)
    run.saver.flush()
    run.set_state(RunState.FINISHED, step=1500, epoch=3.0, horizon=1500)
    run.close()


def test_everything_public_is_on_the_page_of_the_api() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    public = {
        f"resume_adapters.{name}" for name in resume_adapters.__all__ if name not in ("__version__", "ResumeError")
    }
    public |= {f"resume_adapters.data.{name}" for name in resume_adapters.data.__all__}
    assert public <= set(re.findall(r"^::: (\S+)$", page, re.M))


def test_the_pages_of_the_frameworks_have_the_same_headings() -> None:
    found = {name: re.findall(r"^## (.+)$", (ROOT / "docs" / f"{name}.md").read_text(), re.M) for name in ADAPTERS}
    assert all(headings == found["hf"] for headings in found.values()), found


PARTS = [
    *("model", "optimizer", "scheduler", "scaler", "registered", "buffers", "replicas", "counters"),
    *("rng", "data", "metrics", "callbacks", "observed", "trackers", "others"),
]
"""Every part of the state under any framework, in the order of the docstrings and the pages."""


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_who_saves_what_is_told_in_the_same_order_in_the_docstring_and_on_the_page(adapter: str) -> None:
    module = (Path(resume_adapters.__file__).parent / adapter / "__init__.py").read_text()
    told = re.findall(r"^(\w+) +(?:framework|core|both) ", module.split('"""')[1], re.M)
    section = (ROOT / "docs" / f"{adapter}.md").read_text().partition("\n## What is captured\n")[2]
    rows = re.findall(r"^\| ([\w, ]+) \| .+ \| .+ \|$", section.partition("\n##")[0], re.M)
    on_page = [name for row in rows[1:] for name in row.split(", ")]
    assert told == on_page == [name for name in PARTS if name in told]
    assert {*PARTS} - {*told} <= {"registered", "buffers", "replicas", "callbacks"}, "what not every framework has"


def test_each_row_of_what_a_start_reads_has_its_test() -> None:
    rows = re.findall(r"^\| .* \| `([\w/]+\.py)` \|$", (ROOT / "docs" / "security.md").read_text(), re.MULTILINE)
    assert len(rows) > 10 and all((ROOT / "tests" / each).is_file() for each in rows)

"""For any path the command says in one sentence what it found, and scripts see it in the exit code."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import resume_adapters

COMMANDS = [["ls"], ["status"], ["verify"], ["prune", "--keep-last", "1"], ["stop"], ["stop", "--undo"]]
READING = [*COMMANDS, ["export"]]


@pytest.fixture(params=["missing", "file", "empty", "other", "checkpoint", "below a file"])
def no_run_directory(request, run_dir, tmp_path):
    path = {
        "missing": tmp_path / "missing",
        "file": tmp_path / "file",
        "empty": tmp_path / "empty",
        "other": tmp_path / "other",
        "checkpoint": run_dir / "checkpoint-30",
        "below a file": tmp_path / "file" / "run",
    }[request.param]
    (tmp_path / "file").write_text("not a directory")
    (tmp_path / "empty").mkdir()
    (tmp_path / "other" / "photos").mkdir(parents=True)
    return path


@pytest.mark.parametrize("words", READING, ids=" ".join)
def test_exits_with_3_where_there_is_no_run_directory(command, no_run_directory, words):
    done = command(*words, no_run_directory, "--json")
    assert (done.code, done.out) == (3, "")
    assert done.err.startswith("resume-adapters: ")
    assert str(no_run_directory) in done.err
    wanted = (
        f"name its run directory, {no_run_directory.parent}" if "checkpoint" in no_run_directory.name else "expected"
    )
    assert wanted in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("words", [["ls"], ["prune", "RUN", "--keep-last", "many"], ["ls", "RUN", "--fast"], ["sl"]])
def test_exits_with_2_on_wrong_usage(command, run_dir, words):
    assert command(*[run_dir if word == "RUN" else word for word in words]).code == 2


@pytest.mark.parametrize("name", ["du", "journal", "resume", "unhalt", "status --watch", "stop --force"])
def test_says_what_serves_in_the_place_of_a_command_that_is_gone(command, run_dir, name):
    done = command(*name.split(), run_dir)
    assert (done.code, done.out) == (2, "")
    assert f"there is no '{name}' any more: " in done.err and "RUN_DIR" in done.err
    assert f"│ {name} " not in command("--help").out


ALL = [
    "ls",
    "status",
    "report",
    "verify",
    "diff",
    "prune",
    "stop",
    "rewind",
    "export",
    "doctor",
    "drill",
    "demo",
]


@pytest.mark.parametrize("words", [*([name] for name in ALL), []], ids=str)
def test_documents_its_exit_codes(command, words):
    done = command(*words, "--help")
    assert done.code == 0
    assert "Exit codes: 0" in done.out
    assert "bool" not in done.out


def test_says_what_to_install_where_typer_is_missing(command, run_dir):
    done = command(
        "ls", run_dir, code="import sys; sys.modules['typer'] = None; from resume_adapters.cli import main; main()"
    )
    assert done.code == 2
    assert done.err == (
        "resume-adapters: the shell command needs typer and rich: pip install 'typer>=0.19' 'rich>=13.9'\n"
    )


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_imports_neither_torch_nor_a_framework(command, run_dir, words):
    code = (
        "import atexit, sys; from resume_adapters.cli import main;"
        "slow = {'torch', 'numpy', 'transformers', 'lightning', 'accelerate', 'deepspeed', 'matplotlib'};"
        "atexit.register(lambda: print('imported', sorted(slow & set(sys.modules)), file=sys.stderr)); main()"
    )
    done = command(*words, run_dir, code=code)
    assert done.code == 0
    assert done.err.endswith("imported []\n")


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completes_its_commands_in_a_shell(command, shell):
    """What the shell's completion script asks the command: the names that begin so."""
    code = (
        f"import os; os.environ.update(_RESUME_ADAPTERS_COMPLETE='complete_{shell}', COMP_WORDS='resume-adapters re',"
        "COMP_CWORD='1', _TYPER_COMPLETE_ARGS='resume-adapters re');"
        "from resume_adapters.cli import main; main()"
    )
    done = command(code=code)
    assert "rewind" in done.out
    assert "prune" not in done.out


def test_help_has_the_commands_in_groups_and_every_exit_code(command):
    said = " ".join(command("--help").out.split())
    groups = [said.index(f"─ {name} ─") for name in ("Run and prove", "Look", "Steer", "Move")]
    assert groups == sorted(groups)
    assert all(f" {code} " in said[said.index("Exit codes:") :] for code in range(5))


def test_says_its_version_and_its_help(command):
    done = command("--version")
    assert (done.code, done.out) == (0, f"resume-adapters {resume_adapters.__version__}\n")
    for words in (["-h"], ["ls", "-h"]):
        assert (command(*words).code, command(*words).out) == (0, command(*words[:-1], "--help").out)


@pytest.mark.parametrize("words", [["ls"], ["status"]], ids=" ".join)
def test_a_row_is_a_line_where_there_is_no_terminal(run_dir, make_run, words):
    """A pipe has no width at which a table would have to wrap."""
    make_run(run_dir, {40: {"reason": "a reason " * 30, "metrics": {"eval_loss": 1.0}}})
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    done = subprocess.run(
        [sys.executable, "-m", "resume_adapters.cli", *words, run_dir], env=environment, capture_output=True, text=True
    )
    if words == ["ls"]:
        assert "a reason " * 29 in done.stdout and len(done.stdout.splitlines()) == 5
    assert done.stderr == "" and not any(line.startswith(" ") for line in done.stdout.splitlines())


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize(
    "name", ["run", "env", "doctor", "drill", "ls", "status", "verify", "diff", "prune", "stop", "rewind"]
)
def test_no_option_is_cut_in_the_help_of_a_command(command, name, columns):
    wide, narrow = command(name, "--help", columns=200).out, command(name, "--help", columns=columns).out
    lists = [each.partition("Options:")[2].partition("\n\n")[0].splitlines() for each in (wide, narrow)]
    options = [{line.split()[0] for line in each if line.startswith("  -")} for each in lists]
    assert options[0] == options[1] >= {"-h,"}
    assert "…" not in narrow and all(len(line) <= columns for line in narrow.splitlines())

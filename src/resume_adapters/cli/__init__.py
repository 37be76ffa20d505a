"""The command ``resume-adapters``: inspect a run directory, verify it, prune it, steer its run, and drill a command.

==============  ==============================================================================
command         does
==============  ==============================================================================
``run``         run a training command: its Trainers resume, without a change to a script
``doctor``      check what a run needs to come back; with a command, by its first save
``ls``          list the checkpoints of a run directory, oldest first; or several runs, one a line
``status``      show how the run is, and what the same launch would resume from now
``report``      write one HTML file: launches, where the time went, saves, losses
``verify``      read every file of the committed checkpoints and compare the digests
``diff``        compare what a resume would restore from two checkpoints
``pull``        fetch a checkpoint from an object store; ``push`` copies one there
``prune``       remove what a retention policy does not keep
``stop``        ask the run to save and leave; undone, let a halted run be launched again
``rewind``      set the checkpoints after one aside, so that the next launch resumes there
``export``      write the weights of a checkpoint to one safetensors file
``drill``       run your own command with real faults and compare it with an undisturbed run
``demo``        ``drill --demo``: kill an example three times and compare it with one that was never killed
==============  ==============================================================================

Each has ``--json``: one JSON document on standard output, with stable keys. Exit codes:

====  ==================================================================================
code  means
====  ==================================================================================
0     success
1     a checkpoint is damaged, or none is valid; for ``diff``, ``drill`` and ``demo``: the two
      differ; for ``stop --wait``: the run ended otherwise than stopped, halted or finished; for
      ``doctor``: a check is red
2     wrong usage, a refusal (the run is running), or an extra that is not installed
3     no such run directory, or not a run directory
4     ``drill`` could not judge: a launch failed or hung by itself, or the run is too short
====  ==================================================================================

Errors are one sentence on standard error. Importing this package imports neither torch nor a framework.

Read ``app`` first, then a file of ``commands/``: each reads the run directory (``run_directory``), describes what it
found as a document, and shows that as JSON or in words (``render``).
"""

from __future__ import annotations

import sys

from resume_adapters.errors import MissingFramework, ResumeError, RunDirectoryUnusable, UnsupportedSetting

_LINES = "\n"

_GONE = {
    "status --watch": "`watch resume-adapters status RUN_DIR` follows a run",
    "stop --force": "`kill -9` ends a process, and RUN_DIR/.resume/status.json has its number and host",
    "du": "`resume-adapters ls RUN_DIR` shows the sizes of the checkpoints, and `du -a` those of their files",
    "journal": "read RUN_DIR/.resume/journal.jsonl, which has a line for each start, commit, prune and stop",
    "resume": "`resume-adapters stop --undo RUN_DIR` lets a halted run be launched again",
    "unhalt": "`resume-adapters stop --undo RUN_DIR` lets a halted run be launched again",
}
"""What serves in the place of a command, or of an option of one, that former versions had."""


def main() -> None:
    """Run the shell command and end the process with its exit code."""
    try:
        from resume_adapters.cli.app import with_plain_help

        # Each registers its commands; --help lists them in this order.
        from resume_adapters.cli.commands import run, doctor, drill, status, report, verify  # isort: skip  # noqa: F401
        from resume_adapters.cli.commands import diff, steer, copies, export  # isort: skip  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name not in ("rich", "typer"):
            raise
        _leave("the shell command needs typer and rich: pip install 'typer>=0.19' 'rich>=13.9'", 2)
    name, *rest = sys.argv[1:] or [""]
    for words in (name, *(f"{name} {each}" for each in rest)):
        if words in _GONE:
            _leave(f"there is no {words!r} any more: {_GONE[words]}", 2)
    if sys.argv[1:2] == ["demo"]:
        sys.argv[1:2] = ["drill", "--demo"]
    try:
        with_plain_help()(prog_name="resume-adapters")
    except RunDirectoryUnusable as error:
        _leave(str(error), 3)
    except (MissingFramework, UnsupportedSetting) as error:
        _leave(str(error), 2)
    except (ResumeError, OSError) as error:
        _leave(str(error), getattr(error, "exit_code", 1))


def _leave(sentence: str, code: int) -> None:
    from resume_adapters.cli.render import visible

    print(f"resume-adapters: {visible(sentence, keep=_LINES)}", file=sys.stderr)
    sys.exit(code)

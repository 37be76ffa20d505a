"""Names, reasons and hosts in a run directory may come from anybody: what they hold is shown, not obeyed."""

from __future__ import annotations

import json

import pytest

from resume_adapters.cli.render import escape, visible
from resume_adapters.core.run_directory.status import RunState

EVIL = "\x1b]0;owned\x07\x1b[31mred\x9b1m\u202e"


def test_what_does_not_print_is_written_out() -> None:
    assert visible("héllo 日本 \x1b[31m\n\udcff") == "héllo 日本 \\x1b[31m\\n\\udcff"
    assert visible("one\ntwo", keep="\n") == "one\ntwo"
    assert escape("[red]\x07") == "\\[red]\\x07"


@pytest.mark.parametrize("name", ["ls", "status", "verify", "prune"])
def test_no_command_prints_an_escape(command, run_dir, make_run, name) -> None:
    reason = {"reason": EVIL, "metrics": {f"loss{EVIL}": 1.0}}
    run = make_run(run_dir, {40: reason})
    run.set_state(RunState.FAILED, step=40, reason=EVIL)
    (run_dir / "checkpoint-10").rename(run_dir / f"checkpoint-10{EVIL}")
    done = command(name, run_dir, *(["--keep-last", "9"] if name == "prune" else []))
    shown = done.out + done.err
    assert "\\x1b" in shown or name in ("ls",)
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(shown)


def test_an_error_prints_no_escape(command, tmp_path) -> None:
    done = command("ls", tmp_path / EVIL)
    assert done.code == 3 and "\\x1b" in done.err and "\x1b" not in done.err


def test_json_has_the_text_as_it_is(command, run_dir, make_run) -> None:
    make_run(run_dir, {40: {}}).set_state(RunState.FAILED, step=40, reason=EVIL)
    done = command("status", run_dir, "--json")
    assert json.loads(done.out)["reason"] == EVIL

"""What the package says reaches its user once, whatever logging is set up."""

from __future__ import annotations

import io
import logging
import multiprocessing
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm

from resume_adapters.core.log import Voice

Setup = Callable[[], object]


@pytest.fixture(autouse=True)
def only_root() -> Iterator[logging.Logger]:
    """Begin with a root logger that nobody has configured, and restore it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers, root.level = [], logging.WARNING
    yield root
    root.handlers, root.level = handlers, level


def configure(**options: Any) -> None:
    """Configure the root logger, past the handlers of pytest."""
    logging.getLogger().handlers = []
    logging.basicConfig(**options)


@pytest.fixture
def own() -> logging.Logger:
    """The package's logger, which a user may configure."""
    logger = logging.Logger("resume_adapters")
    logger.manager = logging.Manager(logging.getLogger())  # type: ignore[arg-type]
    return logger


@pytest.fixture
def voice(own: logging.Logger) -> Voice:
    return Voice(own)


@pytest.mark.parametrize(
    ("setup", "said"),
    [
        (lambda: None, "resume-adapters: saved 3\n"),
        (configure, "INFO:resume_adapters:saved 3\n"),
        (lambda: configure(level=logging.ERROR), "INFO:resume_adapters:saved 3\n"),
        (lambda: configure(format="%(message)s"), "resume-adapters: saved 3\n"),
        (lambda: configure(handlers=[logging.NullHandler()]), "resume-adapters: saved 3\n"),
        (lambda: configure(handlers=[logging.StreamHandler(io.StringIO())]), "resume-adapters: saved 3\n"),
    ],
    ids=["nothing", "basicConfig", "errors only", "bare", "no console", "a text"],
)
def test_it_is_said_whatever_is_set_up(
    voice: Voice, setup: Setup, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    setup()
    voice.info("saved %d", 3)
    assert capsys.readouterr() == ("", said)


def test_it_goes_through_the_handlers_of_the_framework_and_once_to_the_console(
    voice: Voice, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    framework = logging.getLogger("framework.of_a_test")
    file, console = logging.FileHandler(tmp_path / "log"), logging.StreamHandler(sys.stdout)
    framework.handlers, framework.propagate = [file, console], False
    configure()
    voice.use_channel(framework.name)
    voice.warning("look")
    file.close()
    assert (tmp_path / "log").read_text() == "look\n"
    assert capsys.readouterr() == ("resume-adapters: look\n", "")


def test_who_has_configured_the_logger_decides(
    voice: Voice, own: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    own.setLevel(logging.WARNING)
    voice.info("unwanted")
    voice.error("wanted")
    assert capsys.readouterr().err == "resume-adapters: wanted\n"
    own.setLevel(logging.NOTSET)
    text = io.StringIO()
    own.addHandler(logging.StreamHandler(text))
    voice.info("in its own place")
    assert (text.getvalue(), capsys.readouterr().err) == ("in its own place\n", "")
    own.handlers, own.propagate = [], False
    voice.error("nowhere")
    own.propagate = True
    own.addFilter(lambda record: "secret" not in record.getMessage())
    voice.error("a secret")
    own.manager.disable = logging.ERROR
    voice.error("nothing at all")
    assert capsys.readouterr().err == ""


def test_a_handler_decides_what_it_takes(voice: Voice, capsys: pytest.CaptureFixture[str]) -> None:
    only_errors, no_numbers = logging.StreamHandler(), logging.StreamHandler()
    only_errors.setLevel(logging.ERROR)
    no_numbers.addFilter(lambda record: not record.args)
    configure(handlers=[only_errors, no_numbers], format="%(name)s %(message)s")
    voice.info("plain")
    voice.info("with %d", 1)
    assert capsys.readouterr().err == "resume_adapters plain\nresume-adapters: with 1\n"


def test_a_configuration_of_others_does_not_silence_it(
    voice: Voice, own: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    own.disabled = True
    voice.info("lost")
    voice.use_channel("")
    voice.info("found")
    assert capsys.readouterr().err == "resume-adapters: found\n"
    own.disabled, own.level = True, logging.INFO
    voice.use_channel("")
    voice.info("silenced by its user")
    assert capsys.readouterr().err == ""


def test_a_console_of_another_kind_writes_itself(voice: Voice, capsys: pytest.CaptureFixture[str]) -> None:
    class Rich(logging.Handler):
        console = type("Console", (), {"file": sys.stderr})

        def emit(self, record: logging.LogRecord) -> None:
            sys.stderr.write(f"rich: {self.format(record)}\n")

    configure(handlers=[Rich()], format="%(message)s")
    voice.info("here")
    assert capsys.readouterr().err == "rich: resume-adapters: here\n"


def test_a_console_is_also_known_by_its_descriptor(voice: Voice, capfd: pytest.CaptureFixture[str]) -> None:
    with open(2, "w", closefd=False) as stream:
        configure(stream=stream, format="%(message)s")
        voice.info("here")
    assert capfd.readouterr().err == "resume-adapters: here\n"


def test_it_is_never_written_on_top_of_a_progress_bar(voice: Voice, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    configure(stream=terminal)
    with tqdm(total=3, file=terminal, mininterval=0, ncols=40) as bar:
        bar.update()
        voice.info("here")
        bar.update()
    lines = terminal.getvalue().replace("\n", "\r").split("\r")
    assert "INFO:resume_adapters:here" in lines, "the bar is cleared first"
    assert terminal.getvalue().count("\n") == 2, "and drawn again on the next line"


def test_a_forked_process_that_died_in_a_bar_holds_no_line_back(
    voice: Voice, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The lock of tqdm is shared with forked processes; of one that is killed it is never given back."""
    lock = multiprocessing.RLock()
    monkeypatch.setattr(tqdm, "_lock", lock, raising=False)
    monkeypatch.setattr(tqdm, "_instances", weakref.WeakSet())
    process = multiprocessing.get_context("fork").Process(target=lambda: lock.acquire() and os._exit(1))
    process.start()
    process.join()
    assert not lock.acquire(timeout=0.1), "the test does not test"
    line = threading.Thread(target=voice.info, args=("here",), daemon=True)
    line.start()
    line.join(5)
    assert not line.is_alive() and capsys.readouterr().err == "resume-adapters: here\n"


def test_without_tqdm_it_is_written_as_it_is(
    voice: Voice, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "tqdm")
    voice.info("here")
    assert capsys.readouterr().err == "resume-adapters: here\n"

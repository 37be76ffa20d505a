"""Reading through a stream says how far it is: with a bar on a terminal, with lines elsewhere."""

from __future__ import annotations

import io
import itertools
import logging
import sys

import pytest

from resume_adapters.core import skipping


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_elsewhere_a_line_comes_now_and_then(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    ticks = itertools.count(step=10.0)
    monkeypatch.setattr(skipping.time, "monotonic", lambda: next(ticks))
    with caplog.at_level(logging.INFO, "resume_adapters"):
        assert list(skipping.shown(range(2000))) == list(range(2000))
    first, second = caplog.messages[:2]
    assert "passing over 2,000 batches" in first and "ElasticShards" in first and "StatefulDataLoader" in first
    assert second.startswith("Passed over ") and second.endswith(" of 2,000 batches.")
    assert len(caplog.messages) < 1000


def test_on_a_terminal_there_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    assert list(skipping.shown(range(50))) == list(range(50))
    assert "Passing over batches" in terminal.getvalue()


def test_nothing_to_pass_over_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "resume_adapters"):
        assert list(skipping.shown(range(0))) == []
    assert not caplog.messages

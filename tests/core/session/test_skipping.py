"""Reading through a stream says how far it is: in a line now and then."""

from __future__ import annotations

import itertools
import logging
import subprocess
import sys

import pytest

from resume_adapters.core.session.messages import log_skipping, time


def test_a_line_comes_now_and_then(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    ticks = itertools.count(step=10.0)
    monkeypatch.setattr(time, "monotonic", lambda: next(ticks))
    with caplog.at_level(logging.INFO, "resume_adapters"):
        assert list(log_skipping(range(2000))) == list(range(2000))
    first, second = caplog.messages[:2]
    assert "skipping 2,000 batches" in first and "ElasticShards" in first and "StatefulDataLoader" in first
    assert second.startswith("Skipped ") and second.endswith(" of 2,000 batches.")
    assert len(caplog.messages) < 1000


def test_a_terminal_needs_no_library_that_is_not_a_dependency() -> None:
    """``rich`` comes with the extra ``cli`` alone: a resume at a terminal must not need it."""
    program = """
import sys
sys.modules["rich"] = None
sys.stderr.isatty = lambda: True
from resume_adapters.core.session.messages import log_skipping
print(sum(1 for _ in log_skipping(range(50))))
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=240)
    assert done.stdout == "50\n"


def test_nothing_to_pass_over_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "resume_adapters"):
        assert list(log_skipping(range(0))) == []
    assert not caplog.messages

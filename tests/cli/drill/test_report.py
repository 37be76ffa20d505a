"""What a drill says of its launches."""

from __future__ import annotations

import pytest

from resume_adapters.cli.drill import report
from resume_adapters.cli.drill.faults import Fault
from resume_adapters.cli.drill.job import LaunchTrace


@pytest.mark.parametrize(("kind", "said"), [("step", "SIGKILL after step 26"), ("stop", "a stop file, after step 23")])
def test_a_kill_is_said_of_the_step_after_which_it_came(kind: str, said: str) -> None:
    """A launch that resumes behind the step that was chosen pauses after its first one; a stop lets it go on."""
    started = {"event": "start", "rank": 0, "world_size": 1, "step": 25}
    events = (started, {"event": "step", "rank": 0, "step": 26})
    assert report.row(report.launch(LaunchTrace(4, events, Fault(kind, 23), True))) == ("4", "step 25", said)

"""How fast a run goes."""

from __future__ import annotations

from resume_adapters.core.run.step_control import StepRate


def test_the_rate_is_that_of_the_last_minute_pauses_included() -> None:
    rate = StepRate()
    found = []
    for now, step in ((0.0, 0), (0.0, 1), (1.0, 20), (5.0, 40)):
        rate.add(now, step)
        found.append(rate.rate)
    assert found == [None, None, 20.0, 8.0]
    for second in range(60):
        rate.add(100.0 + second, 100 + 3 * second)
    assert rate.rate == 3.0, "what is longer ago no longer counts"

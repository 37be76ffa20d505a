"""A training run of a shell's tests: it goes on from step 30, says so, and trains until it is stopped."""

from __future__ import annotations

import sys
import time

from resume_adapters.core.run import monitor
from resume_adapters.core.run.run import ResumableRun

monitor._PERIOD = 0.2  # its status has a rate sooner
run = ResumableRun(sys.argv[1])
run.open()
run.begin(30, 3.0)
print("training", flush=True)
step = 30
while True:
    time.sleep(0.02)
    step += 1
    if run.steps.end_step(step, step / 10, 100_000).stop:
        run.leave(step, step / 10)

"""What a run is made of: the options, and what the framework determines."""

from __future__ import annotations

import contextlib
from pathlib import Path

from resume_adapters.core.checkpoint.retention import KeepLast
from resume_adapters.core.session.new_run import new_run
from resume_adapters.core.session.options import ResumeOptions

from miniature import GivenContent
from plain_torch import PlainTorch


def test_a_policy_comes_before_that_of_the_adapter(tmp_path: Path) -> None:
    framework, kept = PlainTorch(1, 1), {}
    for name, chosen in (("of_adapter", None), ("of_user", KeepLast(2))):
        run = new_run(tmp_path / name, framework, ResumeOptions(keep=chosen), keep=KeepLast(1))
        with contextlib.closing(run):
            run.open()
            for step in (1, 2, 3):
                run.saver.save(f"step-{step}", step, GivenContent(lambda path: None))
            run.saver.flush()
            kept[name] = len(run.pruner.prune(run.storage_group, None).keep)
    assert kept == {"of_adapter": 1, "of_user": 2}

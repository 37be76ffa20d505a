"""Save, save again, crash, damage, prune and resume, in any order, against a model held in a dict."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from resume_adapters import KeepAll, KeepBest, KeepEvery, KeepLast, KeepWithin
from resume_adapters.errors import NoValidCheckpoint

import faults
import miniature
from faults import Crash, CrashingStorage
from miniature import Miniature, name, native, own

policies = st.one_of(
    st.just(KeepAll()),
    st.builds(KeepLast, st.integers(1, 3)),
    st.builds(KeepEvery, st.integers(1, 4)),
    st.just(KeepBest(1, "eval_loss")),
    st.just(KeepWithin(timedelta(seconds=5))),
    st.builds(lambda count, steps: KeepLast(count) | KeepEvery(steps), st.integers(1, 2), st.integers(2, 4)),
)
MEMORY = Path("/dev/shm")


def step_of(checkpoint: str) -> int:
    return int(checkpoint.removesuffix(".ckpt").removeprefix("checkpoint-"))


@dataclass
class Kept:
    """What the model knows of a committed checkpoint."""

    text: str
    damaged: bool = False


class RunDirectory(RuleBasedStateMachine):
    """A run directory and its model: the committed checkpoints by step, and those damaged since."""

    files = False

    def __init__(self) -> None:
        super().__init__()
        miniature.FILES = self.files
        self.directory = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None)) / "run"
        self.model: dict[int, Kept] = {}
        self.best: int | None = None
        self.counter = 0
        self.now = 1e6

    def teardown(self) -> None:
        miniature.FILES = False
        shutil.rmtree(self.directory.parent)

    @initialize()
    def start(self) -> None:
        self._resume()

    def _resume(self) -> None:
        """Start again; the newest whole checkpoint is restored exactly, whatever else is there."""
        whole = [step for step, kept in self.model.items() if not kept.damaged]
        expected = max(whole, default=0)
        damaged = {step for step, kept in self.model.items() if kept.damaged and step > expected}
        shelf = set(miniature.set_aside(self.directory))
        self.storage = CrashingStorage()
        options = {"storage": self.storage, "clock": lambda: self.now}
        try:
            self.job = Miniature(self.directory, **options)
        except NoValidCheckpoint as refused:
            assert damaged, "nothing was damaged"
            assert not whole
            assert all(name(step) in str(refused) for step in damaged)
            self.job = Miniature(self.directory, resume="scratch!", **options)
            damaged = set(self.model)
        assert self.job.step == expected
        if expected:
            assert self.job.text == self.model[expected].text
        # A start from scratch also moves away what a crash left unfinished, which the model does not know.
        moved = self._names(set(miniature.set_aside(self.directory)) - shelf)
        assert {name(step) for step in damaged} <= moved
        assert len(moved) <= len(damaged) + (expected == 0)
        for step in damaged:
            del self.model[step]
        if self.best not in self.model:
            self.best = None
        assert not [
            left for left in miniature.leftovers(self.directory) if "pending" in left or left.startswith(".resume/")
        ]

    @staticmethod
    def _names(shelved: set[str]) -> set[str]:
        return {name.rpartition(".")[0] for name in shelved}

    def _text(self) -> str:
        self.counter += 1
        return f"text {self.counter}"

    def _newest(self) -> int:
        return max(self.model, default=0)

    @rule(ahead=st.integers(1, 4), becomes_best=st.booleans())
    def save(self, ahead: int, becomes_best: bool) -> None:
        self._save(self._newest() + ahead, becomes_best)

    @precondition(lambda self: self.model and not self.model[self._newest()].damaged)
    @rule()
    def save_the_same_step(self) -> None:
        self._save(self._newest(), False)

    def _save(self, step: int, becomes_best: bool) -> None:
        text = self._text()
        best = step if becomes_best else self.best
        self.job.run.pruner.keep = KeepAll()
        self.job.commit(step, text, best=best)
        self.model[step] = Kept(text)
        self.best = best

    @rule(at=st.integers(0, 70), torn=st.booleans(), ahead=st.integers(0, 2), policy=policies)
    def crash(self, at: int, torn: bool, ahead: int, policy: KeepAll) -> None:
        """The process dies during a save and the prune that follows it, before some operation or after the last."""
        newest = self._newest()
        if newest == 0 or self.model[newest].damaged:
            ahead = max(ahead, 1)
        step, text = newest + ahead, self._text()
        self.job.run.pruner.keep = policy
        self.storage.torn = torn
        self.storage.crash_at = len(self.storage.operations) + at
        with contextlib.suppress(Crash):
            self.job.commit(step, text, best=self.best)
        self._look(step, text)
        self._resume()
        self.job.run.pruner.keep = KeepAll()
        # What was saved again may still be there: a second copy, which the model does not know.
        self.job.run.pruner.prune(self.job.run.storage_group, None)

    def _look(self, step: int, text: str) -> None:
        """Take over from the disk which of the two contents the step now has, and what the prune removed."""
        former = self.model.get(step)
        found = self._on_disk()
        if found.get(step) == text:
            self.model[step] = Kept(text)
        elif former is None:
            assert step not in found
        whole = [each for each, kept in self.model.items() if not kept.damaged]
        must = {max(whole, default=None), self.best if self.best in whole else None} - {None}
        assert must <= set(found), f"{must - set(found)} is gone"
        self.model = {
            each: kept for each, kept in self.model.items() if each in found or (kept.damaged and self._is_there(each))
        }

    def _is_there(self, step: int) -> bool:
        """Whether a damaged checkpoint is there still; one that is pending again was being removed."""
        added = [own(self.directory / f"{name(step)}{suffix}") for suffix in ("", ".superseded")]
        return any(each.exists() and not (each / "pending").exists() for each in added)

    def _on_disk(self) -> dict[int, str]:
        """Read past the package: the text of each committed checkpoint; the newer where a step has two."""
        found: dict[int, str] = {}
        for path in sorted(miniature.markers(self.directory), reverse=True):
            if path.is_symlink():
                continue
            step = step_of(path.name.removesuffix(".superseded"))
            content = native(path).read_bytes() if native(path).exists() else b""
            found[step] = content[: len(content) // 20].decode(errors="replace")
        return found

    @precondition(lambda self: any(not kept.damaged for kept in self.model.values()))
    @rule(kind=st.sampled_from(sorted(faults.DAMAGES)), which=st.integers(0, 9))
    def damage_the_newest(self, kind: str, which: int) -> None:
        newest = max(step for step, kept in self.model.items() if not kept.damaged)
        files = faults.files_of(self.directory / name(newest))
        faults.DAMAGES[kind](files[which % len(files)])
        self.model[newest].damaged = True

    @rule(policy=policies, later=st.integers(0, 9))
    def prune(self, policy: KeepAll, later: int) -> None:
        self.now += later
        self.job.run.pruner.keep = policy
        plan = self.job.run.pruner.prune(self.job.run.storage_group, None if self.best is None else name(self.best))
        gone = {step for step in self.model if not self._is_there(step)}
        assert gone == {step_of(each) for each in plan.remove if not each.endswith(".superseded")}
        whole = [step for step, kept in self.model.items() if not kept.damaged]
        assert not gone & {max(whole, default=0), self.best}
        for step in gone:
            del self.model[step]

    @rule()
    def resume(self) -> None:
        self._resume()

    @invariant()
    def what_is_whole_is_there(self) -> None:
        found = self._on_disk() if self.model else {}
        for step, kept in self.model.items():
            assert kept.damaged or found[step] == kept.text


class RunDirectoryOfFiles(RunDirectory):
    """The same, with checkpoints that are single files."""

    files = True


FEW = settings(
    max_examples=25,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
MANY = settings(FEW, max_examples=200)

TestRunDirectory = RunDirectory.TestCase
TestRunDirectoryOfFiles = RunDirectoryOfFiles.TestCase
TestRunDirectory.settings = TestRunDirectoryOfFiles.settings = FEW


@pytest.mark.thorough
@pytest.mark.long
class TestRunDirectoryForLong(RunDirectory.TestCase):
    settings = MANY


@pytest.mark.thorough
@pytest.mark.long
class TestRunDirectoryOfFilesForLong(RunDirectoryOfFiles.TestCase):
    settings = MANY

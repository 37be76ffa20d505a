"""A loss of power, by the letter of POSIX, costs no committed checkpoint and leaves nothing that a start trips over."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from power import RecordingStorage, Tree, after_power_loss
from resume_adapters import KeepLast
from resume_adapters.core.checkpoint.validity import ForeignStep
from resume_adapters.core.storage.base import Storage
from selection import often

import miniature
from miniature import Foreign, Miniature, name, native

pytestmark = pytest.mark.usefixtures("shape")

SAMPLES = int(os.environ.get("RESUME_ADAPTERS_POWER_LOSSES", "6"))
"""Trees that are tried for each moment at which the power may go."""

RUN = Path("runs") / "a"


@dataclass(frozen=True)
class Scenario:
    """What is done before the power goes, after the steps 10 and 20 have been committed, if any.

    Attributes:
        work: what is done, given the run directory; it returns when a checkpoint is committed.
        allowed: what a start may resume, by step, while that has not returned.
        then: what it resumes afterwards.
        steps: the steps that were committed before.
    """

    work: Callable[[Path, Storage], None]
    allowed: dict[int, set[str]]
    then: tuple[int, str]
    steps: tuple[int, ...] = (10, 20)


def save_next(directory: Path, storage: Storage) -> None:
    Miniature(directory, storage=storage).commit(30, "thirty", best=10)


def save_again(directory: Path, storage: Storage) -> None:
    Miniature(directory, storage=storage).commit(20, "twenty again", best=10)


def save_and_prune(directory: Path, storage: Storage) -> None:
    Miniature(directory, storage=storage, keep=KeepLast(1)).commit(30, "thirty", best=10)


def save_first(directory: Path, storage: Storage) -> None:
    Miniature(directory, storage=storage).commit(10, "ten")


SCENARIOS = {
    "the next step": Scenario(save_next, {20: {"twenty"}, 30: {"thirty"}}, (30, "thirty")),
    "a step again": Scenario(save_again, {20: {"twenty", "twenty again"}}, (20, "twenty again")),
    "a step, and older ones are removed": Scenario(save_and_prune, {20: {"twenty"}, 30: {"thirty"}}, (30, "thirty")),
    "the first step of a run": Scenario(save_first, {0: {""}, 10: {"ten"}}, (10, "ten"), ()),
}


@pytest.mark.parametrize("case", often(SCENARIOS, "a step again"))
def test_after_a_loss_of_power_the_newest_committed_checkpoint_is_resumed(tmp_path: Path, case: str) -> None:
    scenario = SCENARIOS[case]
    root = tmp_path / "disk"
    root.mkdir()
    for step, text in zip(scenario.steps, ("ten", "twenty"), strict=False):
        Miniature(root / RUN).commit(step, text, best=10)
    storage = RecordingStorage(root)
    scenario.work(root / RUN, storage)
    for at in range(len(storage.events) + 1):
        seen = set[str]()
        for number, tree in enumerate(after_power_loss(storage, at, SAMPLES, seed=0)):
            if (fingerprint := repr(sorted(tree.slots.items())) + repr(sorted(tree.files.items()))) not in seen:
                seen.add(fingerprint)
                require_whole(tmp_path / f"{at}-{number}", tree, scenario, is_done=at == len(storage.events))


def _foreign_step(path: Path) -> ForeignStep | None:
    """Recognise the framework's file alone, as it is without this package's, and take it for a later step."""
    return ForeignStep(90) if native(path).is_file() else None


def require_whole(place: Path, tree: Tree, scenario: Scenario, *, is_done: bool) -> None:
    tree.build(place)
    job = Miniature(place / RUN, foreign=Foreign(_foreign_step))
    where = f"{place.name}: resumed {job.step} {job.text!r}"
    if is_done:
        assert (job.step, job.text) == scenario.then, where
    assert job.text in scenario.allowed.get(job.step, ()), where
    assert job.choice.rejected == (), f"{where}, rejected {job.choice.rejected}"
    if scenario.steps:
        assert name(10) in miniature.committed(place / RUN), f"{where}: the best is gone"
    if miniature.leftovers(place / RUN):  # a commit removes what it has superseded
        job.commit(50, best=10)
    assert not miniature.leftovers(place / RUN), where
    shutil.rmtree(place)

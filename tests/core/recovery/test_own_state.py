"""What a rank keeps outside of its process: read by another rank, once its own is dead."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from resume_adapters.core.recovery import own_state
from resume_adapters.core.recovery.own_state import OwnStates, StepPlace
from resume_adapters.core.recovery.stand_in import assigned
from resume_adapters.core.session.held import HeldCall
from resume_adapters.core.session.options import ResumeOptions
from resume_adapters.core.storage.local import LocalStorage

from plain_torch import Still


def moment(step: int) -> StepPlace:
    return StepPlace("run", step, "")


@pytest.fixture
def ranks(tmp_path: Path) -> list[OwnStates]:
    found = [OwnStates(LocalStorage(), tmp_path, rank) for rank in range(2)]
    for each in found:
        each.keep_launch({})
    return found


def test_the_last_steps_are_there_and_no_others(ranks: list[OwnStates]) -> None:
    for step in range(5):
        for rank, each in enumerate(ranks):
            each.keep(
                moment(step), {"value": torch.full((3 + step % 2,), 10.0 * rank + step), "text": "x" * (9 - step)}
            )
    assert ranks[0].newest(1) == moment(4)
    for step in (2, 3, 4):
        (found, _), objection = ranks[0].find(1, moment(step))
        assert not objection
        assert found["value"].tolist() == [10.0 + step] * (3 + step % 2) and len(found["text"]) == 9 - step
    assert "not kept at that step" in ranks[0].find(1, moment(1))[1]


def test_what_a_rank_was_writing_when_it_died_is_not_used(ranks: list[OwnStates], tmp_path: Path) -> None:
    for step in range(4):
        ranks[1].keep(moment(step), {"value": step})
    slot = tmp_path / "1.0"
    whole = slot.read_bytes()
    for length in (0, 5, len(whole) - 1):
        slot.write_bytes(whole[:length])
        assert ranks[0].newest(1) == moment(2)
    slot.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert ranks[0].newest(1) == moment(2)


def test_large_tensors_are_those_of_a_rank_that_is_left_if_they_were_alike(ranks: list[OwnStates]) -> None:
    def average(value: float) -> dict[str, Any]:
        return {"average": torch.full((1 << 15,), value), "count": 1}

    for step in range(2):
        for each in ranks:
            each.keep(moment(step), average(step))
    (found, _), objection = ranks[0].find(1, moment(1))
    assert not objection and torch.equal(found["average"], average(1)["average"])


def test_large_tensors_that_differ_are_not_replaced(ranks: list[OwnStates]) -> None:
    for rank, each in enumerate(ranks):
        each.keep(moment(1), {"queue": torch.full((1 << 15,), rank)})
    assert "too large" in ranks[0].find(1, moment(1))[1]


def test_large_tensors_that_have_diverged_since_are_not_replaced(ranks: list[OwnStates]) -> None:
    queues = [torch.zeros(1 << 15) for _ in ranks]
    for step in range(5):
        for each, queue in zip(ranks, queues, strict=True):
            each.keep(moment(step), {"queue": queue})
        queues[1] += 1
    assert "too large" in ranks[0].find(1, moment(4))[1]


def test_what_is_not_data_is_not_kept_and_the_training_goes_on(ranks: list[OwnStates]) -> None:
    ranks[0].keep(moment(1), {"value": object()})
    ranks[0].keep(moment(2), {"value": 1})
    assert ranks[0].newest(0) is None
    ranks[1].keep_launch({"value": object()})
    ranks[1].keep_launch({})
    assert "NotSerialisable" in ranks[1].find(0, moment(1))[1]


def test_a_device_is_not_asked_at_each_step(ranks: list[OwnStates], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_state, "_uses_accelerator", lambda: True)
    ranks[1].keep(moment(1), {})
    ranks[1].keep_launch({})
    assert ranks[0].newest(1) is None
    assert "uses a device" in ranks[1].find(0, moment(1))[1]


def test_what_would_be_of_no_use_is_not_kept(ranks: list[OwnStates], tmp_path: Path) -> None:
    """Without its shard, which it alone has, nobody could take its place."""

    def call(framework: Still) -> HeldCall:
        attempt: Any = SimpleNamespace(own_states=ranks[1], add=lambda call: None)
        run: Any = SimpleNamespace(directory=tmp_path)
        nothing: Any = None
        return HeldCall(attempt, run, framework, ResumeOptions(), nothing, nothing, nothing, nothing)

    framework = Still()
    call(framework).require_whole()
    ranks[1].keep(moment(1), {})
    assert ranks[0].newest(1) == moment(1)
    framework.alone = "it is sharded"
    call(framework).require_whole()
    ranks[1].keep(moment(2), {})
    assert ranks[0].newest(1) == moment(1)
    assert ranks[1].find(0, moment(1)) == (None, "what it knew alone is not kept: it is sharded")


def test_each_rank_that_died_gets_one_stand_in() -> None:
    for lost in ([0], [1], [0, 1], [1, 2], [0, 1, 2]):
        found = [rank for left in range(4) if left not in lost for rank in assigned(lost, 4, left)]
        assert sorted(found) == lost

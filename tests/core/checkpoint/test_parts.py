"""The parts of the state that a checkpoint holds, read again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from resume_adapters.core.checkpoint.checkpoint import Checkpoint
from resume_adapters.core.state.stateful import StaticState
from resume_adapters.errors import CheckpointDamaged, NotRestored

from miniature import Miniature


def test_a_part_that_does_not_come_back_is_an_error_unless_nothing_is_to_be_proved(tmp_path: Path) -> None:
    class Dropping:
        def state_dict(self) -> dict[str, int]:
            return {"count": 0}

        def load_state_dict(self, state: Any) -> None: ...

    job = Miniature(tmp_path)
    job.commit(10)
    resumed = Miniature(tmp_path)
    assert resumed.choice.checkpoint is not None
    with pytest.raises(NotRestored, match=r"ema was loaded, but its state is not the saved one.*shadow: not restored"):
        resumed.run.reader(resumed.choice.checkpoint).restore({"ema": Dropping()}, verify=True)
    resumed.run.reader(resumed.choice.checkpoint).restore({"ema": Dropping()}, verify=False)
    foreign = Checkpoint(tmp_path / "elsewhere", 10, None)
    resumed.run.reader(foreign).restore({"ema": Dropping()}, verify=True)
    value = StaticState({"shadow": 1})
    resumed.run.reader(resumed.choice.checkpoint).restore({"ema": value}, verify=True)
    assert value.value["step"] == 10


def test_a_part_whose_files_do_not_fit_together_is_damaged(tmp_path: Path) -> None:
    job = Miniature(tmp_path)
    job.commit(10)
    (tmp_path / "checkpoint-10" / "resume" / "ema.safetensors").unlink()
    assert job.run.resumed is None
    with pytest.raises(CheckpointDamaged, match=r"ema\.json does not fit ema\.safetensors"):
        job.run.reader(Checkpoint(tmp_path / "checkpoint-10", 10, None)).part("ema")

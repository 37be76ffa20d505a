"""The parts of the state that a checkpoint holds, read again."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from resume_adapters.core.checkpoint.checkpoint import Checkpoint
from resume_adapters.core.checkpoint.files import CheckpointFiles
from resume_adapters.core.checkpoint.parts import read_part
from resume_adapters.core.state.stateful import StatefulGroup, StaticState
from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.errors import CheckpointDamaged, NotRestored

from miniature import GivenContent, Miniature


def test_a_part_that_does_not_come_back_is_an_error_where_it_is_to_be_proved(tmp_path: Path) -> None:
    class Dropping:
        def state_dict(self) -> dict[str, int]:
            return {"count": 0}

        def load_state_dict(self, state: Any) -> None: ...

    job = Miniature(tmp_path)
    job.commit(10)
    resumed = Miniature(tmp_path)
    assert resumed.choice.checkpoint is not None
    reader = resumed.run.reader(resumed.choice.checkpoint)
    reader.restore({"ema": Dropping()})
    with pytest.raises(NotRestored, match=r"ema was loaded, but its state is not the saved one.*shadow: not restored"):
        reader.verify({"ema": Dropping()})
    foreign = Checkpoint(tmp_path / "elsewhere", 10, None)
    resumed.run.reader(foreign).restore({"ema": Dropping()})
    resumed.run.reader(foreign).verify({"ema": Dropping()})
    value = StaticState({"shadow": 1})
    reader.restore({"ema": value})
    reader.verify({"ema": value})
    assert value.value["step"] == 10


def test_a_part_that_changes_what_it_is_given_proves_nothing_by_that(tmp_path: Path) -> None:
    class Doubling(StaticState):
        def load_state_dict(self, state: Any) -> None:
            state["step"] *= 2
            super().load_state_dict(state)

    Miniature(tmp_path).commit(10)
    resumed = Miniature(tmp_path)
    assert resumed.choice.checkpoint is not None
    reader, value = resumed.run.reader(resumed.choice.checkpoint), Doubling({"step": 1})
    reader.restore({"ema": value})
    with pytest.raises(NotRestored, match="step: saved 10, restored 20"):
        reader.verify({"ema": value})


class Renaming(torch.nn.Module):
    """Its state has other names than its tensors; of its own `load_state_dict()` torch asks nothing, as of no child."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.BatchNorm1d(2)

    def state_dict(self, **keywords: Any) -> Any:
        return self.inner.state_dict(**{**keywords, "prefix": f"{keywords.get('prefix', '')}other."})


class LeavingOut(torch.nn.Linear):
    """Its bias is not saved, as a frozen encoder's weights often are not."""

    def state_dict(self, **keywords: Any) -> Any:
        found = super().state_dict(**keywords)
        found.pop(f"{keywords.get('prefix', '')}bias")
        return found


@pytest.mark.parametrize("inner", [Renaming, lambda: LeavingOut(2, 2)])
@pytest.mark.parametrize("is_in_a_group", [False, True])
def test_a_module_comes_back_whose_parts_name_their_state_in_a_way_of_their_own(
    tmp_path: Path, inner: Any, is_in_a_group: bool
) -> None:
    def part() -> Any:
        found = torch.nn.Sequential(torch.nn.Linear(2, 2), inner())
        return found, {"ema": StatefulGroup({"0": found}) if is_in_a_group else found}

    saved, parts = part()
    job = Miniature(tmp_path)
    job.run.saver.save("checkpoint-10", 10, GivenContent(lambda path: None, parts))
    job.run.saver.flush()
    resumed = Miniature(tmp_path)
    assert resumed.choice.checkpoint is not None
    reader, (live, parts) = resumed.run.reader(resumed.choice.checkpoint), part()
    with pytest.raises(RuntimeError, match="Missing key"):
        live.load_state_dict(saved.state_dict())
    live[0] = torch.nn.Linear(2, 2)
    reader.restore(parts)
    reader.verify(parts)
    wanted = saved.state_dict()
    assert all(torch.equal(each, wanted[name]) for name, each in live.state_dict().items())


def test_a_module_of_another_shape_or_with_other_names_is_refused_as_torch_does(tmp_path: Path) -> None:
    job = Miniature(tmp_path)
    job.run.saver.save("checkpoint-10", 10, GivenContent(bool, {"ema": torch.nn.Linear(2, 2)}))
    job.run.saver.flush()
    resumed = Miniature(tmp_path)
    assert resumed.choice.checkpoint is not None
    reader = resumed.run.reader(resumed.choice.checkpoint)
    with pytest.raises(RuntimeError, match="size mismatch"):
        reader.restore({"ema": torch.nn.Linear(3, 2)})
    with pytest.raises(RuntimeError, match="Missing key"):
        reader.restore({"ema": torch.nn.BatchNorm1d(2)})


def test_a_part_whose_files_do_not_fit_together_is_damaged(tmp_path: Path) -> None:
    job = Miniature(tmp_path)
    job.commit(10)
    (tmp_path / "checkpoint-10" / "resume" / "ema.safetensors").unlink()
    assert job.run.resumed is None
    with pytest.raises(CheckpointDamaged, match=r"ema\.json does not fit ema\.safetensors"):
        job.run.reader(Checkpoint(tmp_path / "checkpoint-10", 10, None)).part("ema")


def test_containers_of_the_standard_library_come_back_as_what_they_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What is a subclass, or makes its items with a function, comes back as its base; that is said once."""

    class Point(NamedTuple):
        x: float
        y: list[int]

    class Bag(dict[str, int]): ...

    state = {
        "ordered": OrderedDict(b=1, a=[Counter("aab")]),
        "window": deque([1, (2.0, torch.ones(2))], maxlen=4),
        "counts": defaultdict(int, {"a": 1, (1, "b"): 2}),
        "plain": [{"a": 1}, (1, 2), {3}],
    }
    lossy = {"point": Point(1.0, [2]), "bag": Bag(a=1), "made": defaultdict(lambda: 3, a=1)}
    job = Miniature(tmp_path)
    parts = {"kept": StaticState(state), "lossy": StaticState(lossy)}
    for step in (10, 20):
        job.run.saver.save(f"checkpoint-{step}", step, GivenContent(lambda path: None, parts))
        job.run.saver.flush()
    files = CheckpointFiles(LocalStorage(), tmp_path / "checkpoint-20", None)
    found, plain = read_part(files, "kept"), read_part(files, "lossy")
    assert repr(found) == repr(state) and found["window"].maxlen == 4
    assert found["counts"].default_factory is int and found["counts"]["c"] == 0
    assert plain == {"point": (1.0, [2]), "bag": {"a": 1}, "made": {"a": 1}}
    assert [type(each) for each in plain.values()] == [tuple, dict, dict]
    assert caplog.text.count("lossy holds a ") == 3 and "Point: a checkpoint keeps what is in it" in caplog.text


def test_tensors_lie_where_torch_would_put_them(tmp_path: Path) -> None:
    """The last bit of a matrix product depends on where its factors lie, and an object may keep what it is given."""
    state = {f"of {size}": torch.arange(float(size)) for size in (1, 3, 7, 100)}
    job = Miniature(tmp_path)
    job.run.saver.save("checkpoint-10", 10, GivenContent(lambda path: None, {"kept": StaticState(state)}))
    job.run.saver.flush()
    found = read_part(CheckpointFiles(LocalStorage(), tmp_path / "checkpoint-10", None), "kept")
    assert {name: each.data_ptr() % 64 for name, each in found.items()} == dict.fromkeys(state, 0)

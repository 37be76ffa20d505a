"""A save that leaves through memory: exact whatever happens between the save and its commit."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors.torch import save_file

from resume_adapters import KeepAll, Memory
from resume_adapters.core.ranks import SingleProcess
from resume_adapters.core.run.run import ResumableRun
from resume_adapters.core.run_directory.status import RunState
from resume_adapters.core.staging import staging
from resume_adapters.core.staging.arena import Arena
from resume_adapters.core.staging.staging import StagingOptions
from resume_adapters.core.storage import fill
from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.errors import SaveFailed, UnsupportedSetting
from waiting import LIMIT, is_gone, until

from miniature import GivenContent, committed, effects, left_behind, left_open, open_files

SIZE = 160
"""Width of a layer: its weight is large enough to be copied later."""


class Held(Arena):
    """An arena whose copies on the thread that commits wait until somebody lets them go."""

    go_on = threading.Event()

    def copy(self, offset: int, address: int, size: int) -> None:
        if threading.current_thread() is not threading.main_thread() and size > 1 << 16:
            assert self.go_on.wait(LIMIT)
        super().copy(offset, address, size)


def hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what is copied or written after a save wait until ``Held.go_on`` is set."""
    monkeypatch.setattr(staging, "Arena", Held)
    monkeypatch.setattr(Held, "go_on", threading.Event())
    native = fill.fill_holes

    def fill_holes(*arguments: Any) -> None:
        assert Held.go_on.wait(LIMIT)
        native(*arguments)

    monkeypatch.setattr(fill, "fill_holes", fill_holes)


class Training:
    """A model that trains and saves, as a framework would: weights with safetensors, the rest with ``torch.save``.

    Args:
        directory: the run directory.
        stage: how saves leave the training.
        options: of :class:`ResumableRun`.
    """

    def __init__(self, directory: Path, stage: Any = "memory", **options: Any) -> None:
        torch.manual_seed(0)
        self.stage = stage
        self.model = torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), torch.nn.BatchNorm1d(SIZE))
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        self.writes: dict[str, Any] = {}
        self.expected: dict[str, Any] = {}
        chosen = StagingOptions(
            stage,
            **{"optimizers": lambda: [self.optimizer], "tensors": self.model.state_dict, **options.pop("staging", {})},
        )
        options = {"ranks": SingleProcess(), **options}
        self.run = ResumableRun(directory, staging=chosen, keep=KeepAll(), **options)
        self.run.open()
        self.run.begin(0, 0.0)
        self.step_number = 0

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(8, SIZE)).square().mean().backward()
        self.optimizer.step()
        self.average.update_parameters(self.model)
        self.step_number += 1

    def save(self, *, best: str | None = None, **options: Any) -> Path:
        """Save, and remember what the files are to hold."""
        state = {"optimizer": self.optimizer.state_dict(), "average": self.average.state_dict()}
        self.expected = clone({"model": self.model.state_dict(), **state})

        def write(directory: Path) -> None:
            save_file(self.model.state_dict(), directory / "bare.safetensors")
            safetensors.torch.save_file(self.model.state_dict(), directory / "model.safetensors")
            torch.save(state, directory / "state.pt")

        name = f"checkpoint-{self.step_number}"
        self.run.save(name, self.step_number, GivenContent(write, best=best), **options)
        return self.run.directory / name

    def commit(self) -> Path:
        path = self.save()
        self.run.flush()
        self.require_exact(path)
        return path

    def require_exact(self, path: Path) -> None:
        """Require that the files of a checkpoint hold what they were to hold, and that its manifest is right."""
        same(safetensors.torch.load_file(path / "model.safetensors"), self.expected["model"])
        assert (path / "model.safetensors").read_bytes() == (path / "bare.safetensors").read_bytes()
        saved = torch.load(path / "state.pt", weights_only=True)
        same(saved, {name: self.expected[name] for name in ("optimizer", "average")})
        self.run.require_valid(path)

    def is_copied(self) -> bool:
        copies = self.run._staging._fence._copies
        return copies is not None and copies.are_done

    @property
    def committed(self) -> list[int]:
        return sorted(committed(self.run.directory).values())


def clone(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: clone(each) for key, each in tree.items()}
    return tree.detach().clone() if isinstance(tree, torch.Tensor) else tree


def same(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            same(found[key], expected[key])
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    else:
        assert found == expected


@pytest.fixture(params=["memory", "disk"])
def training(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Training]:
    made = Training(tmp_path / "run", request.param)
    yield made
    made.run.close()


def settle(training: Training) -> None:
    """Train and save until copies wait for later."""
    Held.go_on.set()
    for _ in range(3):
        training.step()
        training.commit()
    training.step()
    Held.go_on.clear()


def test_every_save_of_a_run_is_exact_and_its_files_are_native(training: Training, tmp_path: Path) -> None:
    for _ in range(20):
        training.step()
        training.commit()
    assert training.committed == list(range(1, 21))
    assert training.run._staging.decision.startswith(f"{training.stage}: ")
    training.run.set_state(RunState.RUNNING)
    status = json.loads((training.run.directory / ".resume" / "status.json").read_bytes())
    assert status["staging"] == training.run._staging.decision


def test_a_save_returns_before_its_tensors_are_copied_and_a_step_waits(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold(monkeypatch)
    settle(training)
    path = training.save()
    assert not (path / "resume" / "manifest.json").exists()
    threading.Timer(0.2, Held.go_on.set).start()
    training.step()
    training.run.flush()
    training.require_exact(path)


def in_forward(training: Training, change: Callable[[], None]) -> None:
    training.model[0].register_forward_pre_hook(lambda *_: change())


def in_backward(training: Training, change: Callable[[], None]) -> None:
    training.model[0].weight.register_hook(lambda grad: change())


def after_the_save(training: Training, change: Callable[[], None]) -> None:
    native = training.run.save

    def save(*arguments: Any, **options: Any) -> bool:
        done = native(*arguments, **options)
        change()
        return done

    training.run.save = save  # type: ignore[method-assign]


MOMENTS = {"in forward": in_forward, "in backward": in_backward, "in a callback": after_the_save}

CHANGES: dict[str, Callable[[torch.nn.Module, Any], object]] = {
    "through .data": lambda model, optimizer: model[0].weight.data.mul_(0.9),
    "without gradients": lambda model, optimizer: torch.no_grad()(model[0].weight.mul_)(0.9),
    "by numpy": lambda model, optimizer: np.multiply(
        model[0].weight.detach().numpy(), 0.9, out=model[0].weight.detach().numpy()
    ),
    "in C": lambda model, optimizer: ctypes.memset(model[0].weight.data_ptr(), 7, model[0].weight.nbytes),
    "of the optimizer": lambda model, optimizer: [
        each["exp_avg"].data.mul_(0.9) for each in optimizer.state.values() if "exp_avg" in each
    ],
    "a row": lambda model, optimizer: model[0].weight.data[77].mul_(0.9),
    "a buffer": lambda model, optimizer: model[1].running_mean.add_(1),
    "the average": lambda model, optimizer: None,
}


@pytest.mark.parametrize(("stage", "moment"), [*(("memory", each) for each in MOMENTS), ("disk", "in forward")])
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_save_and_commit_in_each_step_never_reaches_the_file(
    tmp_path: Path, stage: str, moment: str, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law 11. What something else than an optimizer changes is found in the first saves, and copied at once."""
    hold(monkeypatch)
    training = Training(tmp_path / "run", stage)

    def apply() -> None:
        CHANGES[change](training.model, training.optimizer)
        if change == "the average":
            Held.go_on.set()  # it asks for the weights, and waits for their copies
            training.average.update_parameters(training.model)

    MOMENTS[moment](training, apply)
    for _ in range(6):
        training.step()
        path = training.save()
        timer = threading.Timer(0.02, Held.go_on.set)
        timer.start()
        training.step()
        training.run.flush()
        if path.exists():
            training.require_exact(path)
        timer.join()  # a save in its time would be copied at once
        Held.go_on.clear()
    is_dropped_once = stage == "disk" and change not in ("a buffer", "the average")
    assert len(training.committed) == 6 - is_dropped_once
    Held.go_on.set()
    training.run.close()


@pytest.mark.parametrize("change", ["through .data", "without gradients", "by numpy", "in C", "of the optimizer"])
def test_a_save_is_dropped_that_something_changes_for_the_first_time_and_the_next_step_is_saved(
    training: Training, change: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hold(monkeypatch)
    settle(training)
    path = training.save()
    CHANGES[change](training.model, training.optimizer)
    Held.go_on.set()
    wait(training.run.engine.in_flight)
    assert training.run.last_commit == 4, "the thread of another rank may not have dropped it yet"
    training.run.flush()
    assert not path.exists() and training.run.last_commit == 3
    said = capsys.readouterr().err
    assert "checkpoint-4 is dropped" in said
    assert ("exp_avg of parameter 0 of AdamW" if change == "of the optimizer" else "0.weight") in said
    training.step()
    assert training.run.end_step(5, 0.5).save
    training.commit()
    assert not training.run.end_step(6, 0.6).save
    for _ in range(2):
        training.step()
        path = training.save()
        CHANGES[change](training.model, training.optimizer)
        training.run.flush()
        training.require_exact(path)
    assert training.committed == [1, 2, 3, 5, 6, 7]


def exchange(model: torch.nn.Module, average: torch.nn.Module) -> None:
    """Put averages in the place of the weights, or back."""
    for weight, mean in zip(model.parameters(), average.parameters(), strict=True):
        kept = mean.data.clone()
        mean.data.copy_(weight.data)
        weight.data.copy_(kept)


def test_a_validation_with_averages_in_the_place_of_the_weights_costs_no_save(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold(monkeypatch)
    settle(training)
    for _ in range(2):
        training.step()
        path = training.save()
        threading.Timer(0.2, Held.go_on.set).start()
        exchange(training.model, training.average.module)
        until(training.is_copied)
        exchange(training.model, training.average.module)
        training.step()
        training.run.flush()
        training.require_exact(path)
        Held.go_on.clear()
    assert training.run._staging._restless == set()
    Held.go_on.set()


@pytest.mark.parametrize("change", CHANGES)
def test_the_best_checkpoint_is_never_dropped(training: Training, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop counts on it by its name; what is copied before the save returns is not changed meanwhile."""
    hold(monkeypatch)
    settle(training)
    threading.Timer(0.2, Held.go_on.set).start()
    path = training.save(best="checkpoint-4")
    assert training.is_copied()
    CHANGES[change](training.model, training.optimizer)
    training.run.flush()
    training.require_exact(path)


def test_a_storage_that_is_gone_is_not_read(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    hold(monkeypatch)
    settle(training)
    copied = threading.Event()
    native = staging.StagedSave.copy
    monkeypatch.setattr(staging.StagedSave, "copy", lambda staged: (copied.wait(LIMIT), native(staged))[1])
    path = training.save()
    training.model[0].weight.untyped_storage().resize_(0)
    copied.set()
    Held.go_on.set()
    training.run.flush()
    assert not path.exists()


def test_the_step_after_a_load_has_the_weights_of_the_save_before(training: Training) -> None:
    settle(training)
    path = training.save()
    training.model.load_state_dict({key: torch.zeros_like(each) for key, each in training.model.state_dict().items()})
    training.run.flush()
    training.require_exact(path)


def test_the_last_save_is_written_at_once(training: Training) -> None:
    settle(training)
    path = training.save(is_last=True)
    same(safetensors.torch.load_file(path / "model.safetensors"), training.expected["model"])
    training.run.flush()
    training.require_exact(path)


def test_the_death_of_the_writer_costs_no_save(training: Training, capsys: pytest.CaptureFixture[str]) -> None:
    settle(training)
    for _ in range(2):
        writer = training.run._staging._writer
        assert writer is not None
        os.kill(writer.pid, signal.SIGKILL)
        os.waitid(os.P_PID, writer.pid, os.WEXITED | os.WNOWAIT)
        training.commit()
        training.step()
    training.commit()
    assert capsys.readouterr().err.count("has died") == 2
    assert training.committed == list(range(1, 7))
    assert training.run._staging._starts == 2


def test_a_writer_that_cannot_be_started_again_costs_no_save(
    training: Training, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settle(training)
    writer = training.run._staging._writer
    assert writer is not None
    os.kill(writer.pid, signal.SIGKILL)
    os.waitid(os.P_PID, writer.pid, os.WEXITED | os.WNOWAIT)

    def fail(*arguments: Any, **options: Any) -> int:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "posix_spawn", fail)
    for _ in range(2):
        training.commit()
        training.step()
    assert capsys.readouterr().err.count("cannot be started again: [Errno 11] Resource") == 1
    assert training.committed == list(range(1, 6))


def test_a_full_disk_fails_the_commit(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    settle(training)

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(staging.Writer, "fill", full)
    training.save()
    with pytest.raises(SaveFailed, match="No space left"):
        training.run.flush()
    monkeypatch.undo()
    training.step()
    training.commit()
    assert training.committed == [1, 2, 3, 5]


@pytest.mark.parametrize("training", ["disk"], indirect=True)
def test_a_full_disk_is_found_before_the_next_step(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    settle(training)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fill, "fill_holes", full)
    training.save()
    training.step()
    with pytest.raises(SaveFailed, match="No space left"):
        training.run.flush()
    monkeypatch.undo()
    training.commit()
    assert training.committed == [1, 2, 3, 5]


@pytest.mark.parametrize("training", ["disk"], indirect=True)
def test_a_file_that_cannot_be_filled_fails_the_commit_on_all_ranks(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle(training)

    def other(*_: Any) -> None:
        raise KeyError("data/0")

    monkeypatch.setattr(fill, "fill_holes", other)
    training.save()
    training.step()
    with pytest.raises(SaveFailed, match="data/0"):
        training.run.flush()
    monkeypatch.undo()
    training.commit()
    assert training.committed == [1, 2, 3, 5]


@pytest.mark.parametrize(
    ("error", "then"), [(RuntimeError, "dropped: parameter 0 of AdamW changed"), (KeyError, "KeyError")]
)
def test_names_that_cannot_be_found_leave_no_rank_waiting(
    tmp_path: Path,
    error: type[Exception],
    then: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def tensors() -> dict[str, Any]:
        raise error("KeyError of the framework")

    training = Training(tmp_path / "run", staging={"tensors": tensors})
    hold(monkeypatch)
    settle(training)
    path = training.save()
    training.model[0].weight.data.mul_(0.9)
    Held.go_on.set()
    failed = pytest.raises(SaveFailed, match=then) if error is KeyError else contextlib.nullcontext()
    with failed:
        training.run.flush()
    assert not path.exists() and (error is KeyError or then in capsys.readouterr().err)
    training.step()
    training.commit()
    training.run.close()


def test_a_save_of_more_files_than_descriptors_is_exact(training: Training) -> None:
    settle(training)
    Held.go_on.set()

    def write(directory: Path) -> None:
        for number in range(200):
            torch.save({"a": torch.full((3,), number)}, directory / f"{number}.pt")
            safetensors.torch.save_file({"a": torch.full((3,), number)}, directory / f"{number}.safetensors")

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))  # other tests of this process may have left some open
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 200, hard))
    try:
        training.run.save("checkpoint-4", 4, GivenContent(write))
        training.run.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    path = training.run.directory / "checkpoint-4"
    for number in range(200):
        expected = {"a": torch.full((3,), number)}
        same(torch.load(path / f"{number}.pt", weights_only=True), expected)
        same(safetensors.torch.load_file(path / f"{number}.safetensors"), expected)
    training.run.require_valid(path)


def test_a_save_that_fails_half_way_leaves_nothing_open(training: Training) -> None:
    settle(training)
    before = open_files()

    def write(directory: Path) -> None:
        torch.save(training.optimizer.state_dict(), directory / "state.pt")
        raise OSError(5, "broken")

    with pytest.raises(SaveFailed, match="broken"):
        training.run.save("checkpoint-4", 4, GivenContent(write))
    until(lambda: not left_open(before), lambda: left_open(before))
    training.commit()


@pytest.mark.parametrize("training", ["memory"], indirect=True)
def test_a_state_that_grows_gets_more_memory(training: Training) -> None:
    settle(training)
    size = training.run._staging._arena.size  # type: ignore[union-attr]
    training.writes = {}
    training.model.register_buffer("large", torch.zeros(1 << 20))
    training.average = torch.optim.swa_utils.AveragedModel(training.model)
    for _ in range(2):
        training.commit()
        training.step()
    assert training.run._staging._arena.size > size + (8 << 20)  # type: ignore[union-attr]
    assert training.run._staging._lacking == 0


def grow(training: Training) -> None:
    """Let a state be larger than the memory for its copy."""
    training.model.register_buffer("large", torch.zeros(1 << 20))
    training.average = torch.optim.swa_utils.AveragedModel(training.model)


@pytest.mark.parametrize(("stage", "then"), [("memory", "off: "), ("auto", "disk: ")])
def test_a_state_that_grows_past_the_memory_that_is_left_gets_none(
    tmp_path: Path, stage: str, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_WORTH_IT", 0)
    training = Training(tmp_path / "run", stage)
    settle(training)
    assert training.run._staging.decision.startswith("memory: ")
    monkeypatch.setattr(staging, "available_memory", lambda storage: 4_000_000)
    grow(training)
    Held.go_on.set()
    for _ in range(2):
        training.commit()
        training.step()
    assert training.run._staging.decision.startswith(then)
    training.run.close()


def test_a_state_that_has_grown_gets_more_memory_once(tmp_path: Path) -> None:
    training = Training(tmp_path / "run", storage=Full())
    settle(training)
    Held.go_on.set()
    grow(training)
    training.commit()
    arena = training.run._staging._arena
    assert arena is not None and arena.size > 8 << 20
    Full.is_full = True
    for _ in range(2):
        training.step()
        training.commit()
    Full.is_full = False
    assert training.run._staging._arena is arena
    training.run.close()


@pytest.mark.parametrize("training", ["memory"], indirect=True)
def test_a_state_that_grows_before_it_was_compared_is_compared_all_the_same(training: Training) -> None:
    training.step()
    training.commit()
    training.model.register_buffer("large", torch.zeros(1 << 20))
    training.average.update_parameters = lambda model: None
    training.step()
    training.commit()
    staging_of_run = training.run._staging
    assert staging_of_run._arena is not None and staging_of_run._arena.size > 4 << 20
    training.model[0].weight.data.mul_(0.9)
    training.optimizer.state[training.model[0].weight]["exp_avg"].data.mul_(0.9)
    training.step()
    assert staging_of_run._restless == {"exp_avg of parameter 0 of AdamW"}


def test_a_copy_of_a_storage_that_is_gone_is_not_compared(training: Training) -> None:
    training.step()
    training.commit()
    training.step()
    training.save()
    training.run.flush()
    for each in training.optimizer.state.values():
        each["exp_avg"].untyped_storage().resize_(0)
    training.optimizer.state.clear()
    training.step()
    training.commit()


LAST: dict[str, Callable[[Any, Path], object]] = {
    "in the usual way": lambda obj, path: torch.save(obj, path),
    "past the capture": lambda obj, path: torch.save(obj, path, pickle_protocol=3),
    "under another name": lambda obj, path: (torch.save(obj, f"{path}.tmp"), os.replace(f"{path}.tmp", path)),
    "under another name, past the capture": lambda obj, path: (
        torch.save(obj, f"{path}.tmp", pickle_protocol=3),
        os.replace(f"{path}.tmp", path),
    ),
    "and not again": lambda obj, path: (path.unlink(), torch.save(obj, f"{path}.other")),
}


@pytest.mark.parametrize("how", LAST)
def test_a_file_that_is_written_twice_in_a_save_holds_what_was_written_last(training: Training, how: str) -> None:
    settle(training)
    Held.go_on.set()
    weight = training.model[0].weight.detach()
    first, last = {"a": weight, "b": torch.rand(9, 9), "c": torch.rand(300)}, {"a": torch.rand(50, 50), "b": weight * 2}

    def write(directory: Path) -> None:
        torch.save(first, directory / "state.pt")
        LAST[how](last, directory / "state.pt")

    training.run.save("checkpoint-4", 4, GivenContent(write))
    training.run.flush()
    path = training.run.directory / "checkpoint-4"
    (file,) = path.glob("state.pt*")
    same(torch.load(file, weights_only=True), last)
    training.run.require_valid(path)


def test_a_file_of_safetensors_that_is_written_twice_holds_what_was_written_last(training: Training) -> None:
    settle(training)
    Held.go_on.set()
    last = {"a": torch.rand(50, 50), "b": training.model[0].weight.detach() * 2}

    def write(directory: Path) -> None:
        safetensors.torch.save_file({"a": torch.rand(300, 300)}, directory / "model.safetensors")
        safetensors.torch.save_file(last, directory / "model.safetensors")

    training.run.save("checkpoint-4", 4, GivenContent(write))
    training.run.flush()
    path = training.run.directory / "checkpoint-4"
    same(safetensors.torch.load_file(path / "model.safetensors"), last)
    training.run.require_valid(path)


class Another(SingleProcess):
    """This rank, and one on which something has changed."""

    changed: tuple[str, ...] = ()

    def gather(self, value: Any) -> list[Any]:
        names = value[0] if isinstance(value, tuple) else None
        is_of_names = isinstance(names, list) and all(isinstance(each, str) for each in names)
        return [value, (list(self.changed), None)] if is_of_names else [value]


def test_a_save_that_another_rank_drops_is_dropped_here_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training = Training(tmp_path / "run", ranks=Another())
    settle(training)
    Another.changed = ("their.weight",)
    path = training.save()
    training.run.flush()
    Another.changed = ()
    assert not path.exists() and "checkpoint-4 is dropped: their.weight changed" in capsys.readouterr().err
    training.step()
    assert training.run.end_step(5, 0.5).save
    path = training.save()
    same(safetensors.torch.load_file(path / "model.safetensors"), training.expected["model"])
    training.run.flush()
    assert training.committed == [1, 2, 3, 5]
    training.run.close()


class Full(LocalStorage):
    """A disk without room."""

    is_full = False

    def free_bytes(self, path: Path) -> int:
        return 0 if self.is_full else super().free_bytes(path)


def test_without_room_on_the_disk_a_save_is_waited_for(tmp_path: Path) -> None:
    training = Training(tmp_path / "run", storage=Full())
    settle(training)
    Full.is_full = True
    path = training.save()
    Full.is_full = False
    same(safetensors.torch.load_file(path / "model.safetensors"), training.expected["model"])
    training.run.flush()
    training.require_exact(path)
    assert training.run._staging._saves == 2
    training.run.close()


def test_a_kill_between_the_copy_and_the_commit_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    """The process that writes is frozen with the files half written, and wakes up when a later start has saved."""
    program = f"""
import os, signal, sys, time
sys.path[:0] = {[str(Path(__file__).parents[2]), str(Path(__file__).parent)]!r}
import test_staging
from pathlib import Path
training = test_staging.Training(Path({str(tmp_path / "run")!r}))
test_staging.settle(training)
pid = training.run._staging._writer.pid
os.kill(pid, signal.SIGSTOP)
training.save()
training.step()
print(pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    with open(tmp_path / "out", "w") as out:
        done = subprocess.run([sys.executable, "-c", program], stdout=out, timeout=2 * LIMIT, check=False)
    assert done.returncode == -signal.SIGKILL
    pid = int((tmp_path / "out").read_text())
    assert (tmp_path / "run" / "checkpoint-4").exists()
    training = Training(tmp_path / "run")
    assert training.run.resumed is not None and training.run.resumed.step == 3
    training.step_number = 3
    training.step()
    path = training.commit()
    os.kill(pid, signal.SIGCONT)
    until(lambda: is_gone(pid))
    training.require_exact(path)
    training.run.close()


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    before = None
    for number in range(3):
        training = Training(tmp_path / str(number))
        settle(training)
        training.save()
        training.run.close()
        before = before or effects()
        assert not left_behind(before)


@contextlib.contextmanager
def decided(tmp_path: Path, stage: str, **options: Any) -> Iterator[str]:
    training = Training(tmp_path / "run", stage, **options)
    for _ in range(3):
        training.step()
        training.commit()
    assert training.run._staging._arena is None or not training.run._staging.decision.startswith("off")
    yield training.run._staging.decision
    training.run.close()


class TestDecision:
    def test_off_says_nothing(self, tmp_path: Path) -> None:
        with decided(tmp_path, "off") as decision:
            assert decision == ""

    def test_a_small_state_is_written_at_once(self, tmp_path: Path) -> None:
        with decided(tmp_path, "auto") as decision:
            assert decision == "off: 0.5 MB are written about as fast as they are copied"

    def test_an_objection_of_the_adapter_counts(self, tmp_path: Path) -> None:
        with decided(tmp_path, "auto", staging={"objection": lambda: "a callback reads it"}) as decision:
            assert decision == "off: a callback reads it"

    def test_a_state_that_fits_is_copied(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(staging, "_WORTH_IT", 0)
        with decided(tmp_path, "auto") as decision:
            assert decision.startswith("memory: ")

    def test_more_than_half_of_what_is_left_goes_to_the_disk(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(staging, "_WORTH_IT", 0)
        monkeypatch.setattr(staging, "available_memory", lambda storage: 1_000_000)
        with decided(tmp_path, "auto") as decision:
            assert decision.startswith("disk: ")

    def test_what_has_to_be_copied_and_finds_no_room(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(staging, "_BESIDE", 1 << 10)
        with decided(tmp_path, "disk") as decision:
            assert "change elsewhere than in an optimizer's step" in decision

    def test_memory_that_cannot_be_had(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(staging, "_SPARE", -(10**9))
        with decided(tmp_path, "memory") as decision:
            assert "cannot be had" in decision

    def test_a_machine_without_room_for_another_descriptor(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(name: str) -> int:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        monkeypatch.setattr(os, "memfd_create", fail)
        with decided(tmp_path, "memory") as decision:
            assert decision.startswith("off: ") and "cannot be had: Too many open files" in decision

    def test_what_the_machine_has_not(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(staging, "available_memory", lambda storage: 1_000_000)
        with decided(tmp_path, "memory") as decision:
            assert decision == "off: 0.5 MB are more than the 1 MB of memory that are left"

    def test_another_system(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(os, "memfd_create")
        with decided(tmp_path, "memory") as decision:
            assert decision.startswith("off: this system")

    def test_other_files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(staging, "is_exact", lambda: False)
        with decided(tmp_path, "memory") as decision:
            assert "differ from the captured ones" in decision

    def test_a_save_past_torch(self, tmp_path: Path) -> None:
        run = ResumableRun(tmp_path / "run", ranks=SingleProcess(), staging=StagingOptions("memory"))
        run.open()
        content = GivenContent(lambda directory: LocalStorage().write(directory / "model.bin", b"x"))
        for step in (1, 2, 3):
            run.save(f"checkpoint-{step}", step, content)
            run.flush()
        assert run._staging.decision.startswith("off: nothing that is saved goes through torch.save")
        run.close()

    def test_a_word_that_is_none_is_refused(self) -> None:
        with pytest.raises(UnsupportedSetting, match='expected "auto", "memory", "disk" or "off"'):
            StagingOptions("tape")  # type: ignore[arg-type]


@pytest.mark.parametrize("stage", ["memory", "disk"])
def test_the_copy_in_memory_of_a_commit_is_not_read_from_the_disk(tmp_path: Path, stage: Any) -> None:
    """What the save has captured is in memory already, and on the disk it may have passed the cache."""
    (tmp_path / "memory").mkdir()
    memory, storage = Memory(directory=str(tmp_path / "memory")), ReadStorage()
    training = Training(tmp_path / "run", stage, mirror=[memory], storage=storage)
    settle(training)
    storage.read_from.clear()
    training.step()
    path = training.commit()
    tier = training.run._memory_tier
    assert tier is not None
    for name in ("bare.safetensors", "model.safetensors", "state.pt"):
        assert (tier.directory / path.name / name).read_bytes() == (path / name).read_bytes()
    assert tier.step == training.step_number
    assert {each.name for each in storage.read_from if each.parent == path} == {"bare.safetensors"}
    training.run.close()


class ReadStorage(LocalStorage):
    """A disk that knows which files were read piece by piece."""

    def __init__(self) -> None:
        super().__init__()
        self.read_from: list[Path] = []

    def read_range(self, path: Path, offset: int, count: int) -> bytes:
        self.read_from.append(path)
        return super().read_range(path, offset, count)


def test_a_save_to_memory_is_copied_too_and_one_that_something_changes_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = Memory(every=100, save_every=1, directory=str(tmp_path / "memory"))
    (tmp_path / "memory").mkdir()
    training = Training(tmp_path / "run", mirror=[memory])
    tier = training.run._memory_tier
    assert tier is not None
    hold(monkeypatch)
    settle(training)
    with monkeypatch.context() as patch:
        patch.setattr(training.run, "save", training.run.save_to_memory)
        name = training.save().name
        Held.go_on.set()
        training.step()
        training.run.flush()
        training.require_exact(tier.directory / name)
        Held.go_on.clear()
        training.save()
        with torch.no_grad():
            training.model[0].weight.add_(1)
        Held.go_on.set()
        training.run.flush()
    assert sorted(committed(tier.directory).values()) == [4]
    assert "checkpoint-5 is dropped: 0.weight changed" in capsys.readouterr().err
    assert not training.run.end_step(6, 0.6).save
    assert (training.committed, training.run.last_commit) == ([1, 2, 3], 3)
    training.run.close()

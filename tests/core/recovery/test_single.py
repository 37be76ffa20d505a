"""A block in a single process: what it goes on from, when it is given up, and its hooks."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from resume_adapters import Memory, Remote
from resume_adapters.core import devices
from resume_adapters.core.recovery import block
from resume_adapters.core.recovery.attempt import running_attempt
from resume_adapters.core.recovery.hang import Pulse
from resume_adapters.core.recovery.meeting import Meeting
from resume_adapters.core.recovery.memory import MemoryDirectory
from resume_adapters.core.recovery.options import BlockOptions
from resume_adapters.core.recovery.options import Launch as LaunchOfBlock
from resume_adapters.core.run_directory.control import Fencing
from resume_adapters.core.run_directory.status import RunState, RunStatus, StatusFile
from resume_adapters.core.session.held import HeldCall
from resume_adapters.core.state.frozen import FrozenBuffers
from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.core.tiers.mirrors import MIRROR_THREAD
from resume_adapters.errors import Halted, PeerFailed, RunHalted, Stopped, UnsupportedSetting
from resume_adapters.recovery import Attempt, Failure, Level, restartable
from waiting import LIMIT, until

from plain_torch import Launch, PlainTorch

Fault = Callable[[Launch, Attempt], None]


class Job:
    """A block that trains in a directory, and fails as it is told after each batch."""

    def __init__(self, directory: Path, fault: Fault = lambda launch, attempt: None, **options: Any) -> None:
        self.directory, self.fault, self.options = directory, fault, options
        self.attempts: list[Attempt] = []
        self.launch: Launch | None = None

    def __call__(self, **settings: Any) -> Launch:
        @restartable(**settings)
        def main(attempt: Attempt) -> Launch:
            self.attempts.append(attempt)
            self.launch = Launch(self.directory, lambda launch: self.fault(launch, attempt), **self.options)
            return self.launch()

        return main()

    @property
    def levels(self) -> list[Level | None]:
        return [each.level for each in self.attempts]


def journal(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / ".resume/journal.jsonl").read_text().splitlines()]


def fail_at(step: int, times: int = 1, error: type[Exception] = RuntimeError, message: str = "lost") -> Fault:
    def fault(launch: Launch, attempt: Attempt) -> None:
        if launch.loop.global_step == step and attempt.number < times:
            raise error(message if attempt.number == 0 else f"{message} again")

    return fault


def test_the_step_that_failed_is_done_again(tmp_path: Path) -> None:
    whole = Job(tmp_path / "whole")()
    job = Job(tmp_path / "run", fail_at(7, times=2))
    assert job().end == whole.end
    assert job.levels == [None, Level.DISK, Level.DISK]  # the step had been taken, and the body of the loop not ended
    recoveries = [each for each in journal(tmp_path / "run") if each["event"] == "recovery"]
    assert [(each["level"], each["step"], each["lost"], each["rank"]) for each in recoveries] == [
        ("disk", 4, 2, 0),
        ("disk", 4, 2, 0),
    ]
    assert recoveries[0]["error"] == "RuntimeError: lost"
    assert 0 < recoveries[0]["seconds"] < LIMIT


def fails_in_forward(job: Job, *steps: int, after: Callable[[Launch], object] = lambda launch: None) -> None:
    """Let the forward pass do something, and fail, once at each of these steps."""
    left = list(steps)

    class Failing(torch.nn.Module):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            step = job.launch.loop.global_step if job.launch else 0
            if step in left:
                left.remove(step)
                assert job.launch is not None, "it trains"
                after(job.launch)
                raise ValueError(f"forward at {step}")
            return values

    native = Launch.__init__

    def made(self: Launch, *arguments: Any, **options: Any) -> None:
        native(self, *arguments, **options)
        self.framework.model[2].register_forward_pre_hook(lambda module, given: (Failing()(given[0]),))

    Launch.__init__ = made  # type: ignore[method-assign]


@pytest.fixture
def forward(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    monkeypatch.setattr(Launch, "__init__", Launch.__init__)
    return fails_in_forward


def test_no_step_is_lost_where_the_weights_are_those_of_a_steps_end(
    tmp_path: Path, forward: Callable[..., None]
) -> None:
    whole = Job(tmp_path / "whole")()
    job = Job(tmp_path / "run")
    forward(job, 3, 4, 9)
    assert job().end == whole.end
    assert job.levels == [None, Level.MEMORY, Level.MEMORY, Level.MEMORY]
    recoveries = [each for each in journal(tmp_path / "run") if each["event"] == "recovery"]
    assert [(each["level"], each["step"], each["lost"]) for each in recoveries] == [
        ("memory", 3, 0), ("memory", 4, 0), ("memory", 9, 0),
    ]  # fmt: skip
    commits = [each["step"] for each in journal(tmp_path / "run") if each["event"] == "commit"]
    assert commits == [4, 8, 12, 16, 18]
    assert running_attempt() is None


def test_a_schedule_that_has_moved_since_the_last_step_is_held_as_it_was(tmp_path: Path) -> None:
    def fail(launch: Launch, attempt: Attempt) -> None:
        if launch.framework.schedule.last_epoch == launch.loop.global_step + 1 and attempt.number == 0:
            raise RuntimeError("behind the end of the first epoch")

    whole = Job(tmp_path / "whole", script="annealed")()
    job = Job(tmp_path / "run", fail, script="annealed")
    assert job().end == whole.end
    assert job.levels == [None, Level.MEMORY]


def stopped(job: Job, kind: type[Stopped] = Stopped, **settings: Any) -> str:
    """Run a job that is left, and return why."""
    with pytest.raises(kind) as found:
        job(**settings)
    return found.value.reason


def test_nobody_waits_for_a_loss_where_a_step_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may still be computed on a device."""
    read: list[bool] = []
    holding: list[bool] = []
    keep = HeldCall.keep

    class Loss(torch.Tensor):
        def __float__(self) -> float:
            read.append(bool(holding))
            return self.item()

    def watched(self: HeldCall, *given: Any) -> None:
        holding.append(True)
        keep(self, *given)
        holding.clear()

    monkeypatch.setattr(HeldCall, "keep", watched)

    @restartable()
    def main(attempt: Attempt) -> None:
        launch = Launch(tmp_path / "run")
        train = launch.framework.train
        launch.framework.train = lambda batch: train(batch).as_subclass(Loss)  # type: ignore[method-assign]
        launch()

    main()
    assert read and not any(read)
    saved = json.loads((tmp_path / "run/checkpoint-8/resume/manifest.json").read_text())
    assert isinstance(saved["manifest"]["metrics"]["loss"], float)


def newest(directory: Path) -> int:
    return max(each["step"] for each in journal(directory) if each["event"] == "commit")


def test_a_stop_is_not_forgotten(tmp_path: Path, forward: Callable[..., None]) -> None:
    """What is in memory is saved before the run is left: the step that failed is done first."""
    job = Job(tmp_path / "run")
    forward(job, 5, after=lambda launch: os.kill(os.getpid(), signal.SIGUSR1))
    assert stopped(job) == "SIGUSR1"
    assert job.levels == [None, Level.MEMORY]
    assert newest(tmp_path / "run") == 6
    assert Job(tmp_path / "run")().end == Job(tmp_path / "whole")().end


def test_a_halt_is_not_forgotten(tmp_path: Path, forward: Callable[..., None]) -> None:
    job = Job(tmp_path / "run")
    forward(job, 5, after=lambda launch: launch.run.flag.halt("look at it"))
    assert stopped(job, Halted) == "look at it"
    with pytest.raises(RunHalted, match="look at it"):
        Job(tmp_path / "run")()


def test_a_stop_is_not_forgotten_where_the_next_attempt_fails_before_its_training(
    tmp_path: Path, forward: Callable[..., None]
) -> None:
    job = Job(tmp_path / "run")
    forward(job, 5, after=lambda launch: os.kill(os.getpid(), signal.SIGUSR1))

    def initialize(attempt: Attempt) -> None:
        if attempt.number == 1:
            raise OSError("no data")

    assert stopped(job, initialize=initialize) == "SIGUSR1"


def test_a_stop_leaves_at_once_what_goes_on_from_the_disk(tmp_path: Path) -> None:
    def fault(launch: Launch, attempt: Attempt) -> None:
        if launch.loop.global_step == 6:
            os.kill(os.getpid(), signal.SIGUSR1)
            raise RuntimeError("after the update")

    job = Job(tmp_path / "run", fault)
    assert stopped(job) == "SIGUSR1"
    assert job.levels == [None, Level.DISK] and newest(tmp_path / "run") == 4


def test_a_stop_that_a_shell_has_asked_for_is_not_forgotten(tmp_path: Path, forward: Callable[..., None]) -> None:
    def wait(launch: Launch, attempt: Attempt) -> None:
        if (attempt.number, launch.loop.global_step) == (1, 6):
            until(lambda: launch.run.flag.reason is not None)  # whoever looks for it does so once a second

    job = Job(tmp_path / "run", wait)
    forward(job, 5, after=lambda launch: launch.run.control.stop_file.request("a shell"))
    assert "a shell" in stopped(job)


@pytest.mark.thorough
def test_copies_go_on_through_recoveries(tmp_path: Path, forward: Callable[..., None]) -> None:
    """Each attempt claims the tiers, the last one completes the copies, and an empty machine resumes from them."""
    (tmp_path / "memory").mkdir()
    remote = Remote(f"file://{tmp_path}/bucket", timeout=timedelta(seconds=30))
    mirror = [remote, Memory(directory=str(tmp_path / "memory"))]
    whole = Job(tmp_path / "whole")()
    job = Job(tmp_path / "run", fail_at(10, times=3), mirror=mirror)
    forward(job, 3, 5)
    assert job().end == whole.end
    assert job.levels == [None, Level.MEMORY, Level.MEMORY, Level.DISK]
    assert len(list((tmp_path / "bucket/.resume/claims").iterdir())) == 4
    assert list((tmp_path / "memory").glob("*/*")) == []
    assert not [each for each in threading.enumerate() if each.name == MIRROR_THREAD]
    shutil.rmtree(tmp_path / "run")
    again = Launch(tmp_path / "run", mirror=mirror)()
    assert again.run.resumed is not None
    assert (again.run.resumed.step, again.run.generation, again.end[0]) == (18, 5, whole.end[0])


def test_a_failure_before_the_first_step_after_a_recovery_goes_on_from_the_same_memory(
    tmp_path: Path, forward: Callable[..., None]
) -> None:
    whole = Job(tmp_path / "whole")()
    job = Job(tmp_path / "run")
    forward(job, 5, 5)
    with pytest.raises(ValueError, match="forward at 5"):
        job()
    job = Job(tmp_path / "other")
    forward(job, 5)
    left = ["once"]

    def fail(launch: Launch, attempt: Attempt) -> None:
        if attempt.number == 1 and left:
            left.clear()
            raise RuntimeError("in the first step after it")

    job.fault = fail
    assert job().end == whole.end
    assert job.levels == [None, Level.MEMORY, Level.MEMORY]


@pytest.mark.thorough
def test_a_failure_before_the_next_training_begins_goes_on_from_the_same_memory(
    tmp_path: Path, forward: Callable[..., None]
) -> None:
    whole = Job(tmp_path / "whole")()
    job = Job(tmp_path / "run")
    forward(job, 5)
    seen: list[Level | None] = []

    def initialize(attempt: Attempt) -> None:
        seen.append(attempt.level)
        if attempt.number == 1:
            raise OSError("no data")

    assert job(initialize=initialize).end == whole.end
    assert seen == [None, Level.MEMORY, Level.MEMORY]
    recoveries = [each for each in journal(tmp_path / "run") if each["event"] == "recovery"]
    assert [(each["level"], each["step"], each["lost"], each["reason"]) for each in recoveries] == [
        ("memory", 5, 0, "")
    ]


@pytest.mark.thorough
def test_a_failure_in_the_next_update_goes_on_from_the_same_memory(
    tmp_path: Path, forward: Callable[..., None]
) -> None:
    def fault(launch: Launch, attempt: Attempt) -> None:
        if launch.loop.global_step == 11 and attempt.number == 1:
            raise RuntimeError("after the second update")

    whole = Job(tmp_path / "whole")()
    job = Job(tmp_path / "run", fault)
    forward(job, 9)
    assert job().end == whole.end
    assert job.levels == [None, Level.MEMORY, Level.MEMORY]
    recoveries = [each for each in journal(tmp_path / "run") if each["event"] == "recovery"]
    assert [(each["step"], each["lost"]) for each in recoveries] == [(9, 0), (9, 1)]


def test_what_is_on_the_disk_is_used_where_it_is_later_than_what_is_in_memory(
    tmp_path: Path, forward: Callable[..., None]
) -> None:
    def fault(launch: Launch, attempt: Attempt) -> None:
        if launch.loop.global_step == 9 and attempt.number == 1:
            launch.run.saver.flush()
            raise RuntimeError("after the update")

    whole = Job(tmp_path / "whole")()
    job = Job(tmp_path / "run", fault)
    forward(job, 7)
    assert job().end == whole.end
    assert job.levels == [None, Level.MEMORY, Level.DISK]
    recoveries = [each for each in journal(tmp_path / "run") if each["event"] == "recovery"]
    assert [(each["step"], each["lost"]) for each in recoveries] == [(7, 0), (8, 0)]


def test_the_same_failure_twice_is_a_bug(tmp_path: Path) -> None:
    def fault(launch: Launch, attempt: Attempt) -> None:
        if launch.loop.global_step == 6:
            raise KeyError("always")

    job = Job(tmp_path / "run", fault)
    with pytest.raises(KeyError, match="always"):
        job()
    assert len(job.attempts) == 2
    status = json.loads((tmp_path / "run/.resume/status.json").read_text())
    assert status["state"] == "failed"
    assert "rank 0 failed after step 5: KeyError: 'always'" in status["reason"]


def test_it_is_given_up_at_the_limit(tmp_path: Path) -> None:
    job = Job(tmp_path / "run", fail_at(6, times=9))
    with pytest.raises(RuntimeError, match="lost again"):
        job(max_restarts=1)
    assert len(job.attempts) == 2


@pytest.mark.parametrize("failing", [6, 8])
def test_the_last_whole_step_is_committed_before_the_error_leaves(
    tmp_path: Path, forward: Callable[..., None], failing: int
) -> None:
    whole = Job(tmp_path / "whole")()
    job = Job(tmp_path / "run")
    forward(job, failing)
    with pytest.raises(ValueError, match=f"forward at {failing}"):
        job(max_restarts=0)
    commits = [(each["step"], each["reason"]) for each in journal(tmp_path / "run") if each["event"] == "commit"]
    assert commits == [(4, "scheduled"), (6, "failed") if failing == 6 else (8, "scheduled")]
    assert json.loads((tmp_path / "run/.resume/status.json").read_text())["state"] == "failed"
    assert not list((tmp_path / "run/.resume").glob("begin-*"))
    later = Job(tmp_path / "run")
    assert later().end == whole.end
    assert [each["step"] for each in journal(tmp_path / "run") if each["event"] == "resume"] == [failing]


def test_a_start_that_another_has_replaced_commits_no_last_step(
    tmp_path: Path, forward: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(tmp_path / "run")
    forward(job, 6, after=lambda launch: Fencing(LocalStorage(), tmp_path / "run/.resume", time.time).take_over())
    with pytest.raises(ValueError, match="forward at 6"):
        job(max_restarts=0)
    # The commit of step 4 may have been under way, and is then fenced off, too.
    assert {each["step"] for each in journal(tmp_path / "run") if each["event"] == "commit"} <= {4}
    assert "The last whole step could not be saved: rank 0: " in caplog.text


def test_it_is_given_up_before_any_training() -> None:
    @restartable(max_restarts=0)
    def main(attempt: Attempt) -> None:
        raise OSError("no such data")

    with pytest.raises(OSError, match="no such data"):
        main()


def test_what_is_refused_is_not_tried_again(tmp_path: Path) -> None:
    job = Job(tmp_path / "run", fail_at(2, times=9, error=UnsupportedSetting, message="a setting"))
    with pytest.raises(UnsupportedSetting, match="a setting"):
        job()
    assert len(job.attempts) == 1


def test_a_run_that_was_never_opened_is_left_as_it_was(tmp_path: Path) -> None:
    @restartable()
    def main(attempt: Attempt) -> None:
        Launch(tmp_path / "run")
        raise UnsupportedSetting("something else")

    with pytest.raises(UnsupportedSetting, match="something else"):
        main()
    assert not (tmp_path / "run/.resume/status.json").exists()


@pytest.fixture
def destroyed() -> Iterator[None]:
    """Leave no process group behind."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_process_alone_makes_its_group_again(tmp_path: Path, forward: Callable[..., None], destroyed: None) -> None:
    """As a script that is launched on one device or on many; each attempt has a group, and the writing to memory."""
    whole = Job(tmp_path / "whole")()
    job = Job(tmp_path / "run")
    forward(job, 5, 9)
    assert job(initialize=lambda attempt: dist.init_process_group("gloo")).end == whole.end
    assert job.levels == [None, Level.MEMORY, Level.MEMORY]
    assert dist.get_world_size() == 1


def test_a_group_that_was_made_before_the_block_is_refused(tmp_path: Path, destroyed: None) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    job = Job(tmp_path / "run")
    with pytest.raises(UnsupportedSetting, match="the process group was made before the restartable block began"):
        job()
    assert not job.attempts


def test_a_torch_that_was_built_without_process_groups_recovers(
    tmp_path: Path, forward: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Job(tmp_path / "whole")()
    monkeypatch.delattr(torch._C, "_c10d_init")
    for name in ("distributed_c10d", "is_initialized", "init_process_group", "new_group"):
        monkeypatch.delattr(dist, name)
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", None)
    assert not dist.is_available()
    job = Job(tmp_path / "run")
    forward(job, 5)
    assert job().end == whole.end
    assert job.levels == [None, Level.MEMORY]


def test_a_failure_before_any_training_is_tried_again() -> None:
    numbers: list[int] = []

    @restartable()
    def main(attempt: Attempt, word: str) -> str:
        numbers.append(attempt.number)
        drawn = torch.rand(1).item()
        if attempt.number == 0:
            raise OSError(str(drawn))
        assert attempt.failure is not None and attempt.failure.message == str(drawn), "it began in the same state"
        return word

    assert main("done") == "done"
    assert numbers == [0, 1]


def test_a_block_within_a_block_is_refused() -> None:
    @restartable()
    def inner(attempt: Attempt) -> None: ...

    @restartable()
    def outer(attempt: Attempt) -> None:
        inner()

    with pytest.raises(UnsupportedSetting, match="within another one"):
        outer()


def test_hooks_are_called_with_the_attempt() -> None:
    seen: list[tuple[str, int]] = []
    hooks = {
        name: lambda attempt, name=name: seen.append((name, attempt.number))
        for name in ("initialize", "abort", "finalize", "health_check")
    }

    @restartable(**hooks)  # type: ignore[arg-type]
    def main(attempt: Attempt) -> None:
        if attempt.number == 0:
            raise OSError

    main()
    assert seen == [("initialize", 0), ("abort", 0), ("finalize", 0), ("health_check", 1), ("initialize", 1)]


def test_a_process_that_is_not_well_does_not_go_on() -> None:
    def sick(attempt: Attempt) -> None:
        raise RuntimeError("no memory")

    @restartable(health_check=sick)
    def main(attempt: Attempt) -> None:
        raise OSError

    with pytest.raises(PeerFailed, match="rank 0 cannot go on in its process: RuntimeError: no memory"):
        main()


def test_where_memory_is_full_the_disk_is_used(
    tmp_path: Path, forward: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    whole = Job(tmp_path / "whole")()
    monkeypatch.setattr(MemoryDirectory, "of_attempt", lambda self, number: tmp_path / "file" / str(number))
    job = Job(tmp_path / "run")
    forward(job, 7)
    assert job().end == whole.end
    assert job.levels == [None, Level.DISK]


def test_memory_is_not_used_once_another_start_owns_the_run_directory(
    tmp_path: Path, forward: Callable[..., None]
) -> None:
    whole = Job(tmp_path / "whole")()
    job = Job(tmp_path / "run")
    forward(job, 7)

    def take_over(attempt: Attempt) -> None:
        Fencing(LocalStorage(), tmp_path / "run/.resume", time.time).take_over()

    assert job(finalize=take_over).end == whole.end
    assert job.levels == [None, Level.MEMORY]
    recoveries = [each for each in journal(tmp_path / "run") if each["event"] == "recovery"]
    assert [(each["step"], each["lost"]) for each in recoveries] == [(4, 3)]


def test_memory_that_is_damaged_is_not_used(
    tmp_path: Path, forward: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Job(tmp_path / "whole")()
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setattr(MemoryDirectory, "of_attempt", lambda self, number: memory / str(number))
    job = Job(tmp_path / "run")
    forward(job, 7)

    def damage(attempt: Attempt) -> None:
        (memory / "1/checkpoint-7/weights.pt").write_bytes(b"x")

    assert job(finalize=damage).end == whole.end
    recoveries = [each for each in journal(tmp_path / "run") if each["event"] == "recovery"]
    assert [(each["step"], each["lost"]) for each in recoveries] == [(4, 3)]


def test_who_fails_while_it_holds_a_step_holds_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Job(tmp_path / "whole")()
    take, taken = FrozenBuffers.take, []

    def fail_once(self: FrozenBuffers) -> Any:
        taken.append(1)
        if len(taken) == 7:
            raise RuntimeError("while it holds")
        return take(self)

    monkeypatch.setattr(FrozenBuffers, "take", fail_once)
    job = Job(tmp_path / "run")
    assert job().end == whole.end
    assert job.levels == [None, Level.DISK]


def test_a_disk_that_is_full_is_no_failure_of_the_attempt_where_the_run_goes_on_without_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Job(tmp_path / "whole")()
    save = PlainTorch.save

    def fill_up(self: PlainTorch, directory: Path) -> None:
        if directory.is_relative_to(tmp_path / "run") and job.launch and job.launch.loop.global_step == 8:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(self, directory)

    monkeypatch.setattr(PlainTorch, "save", fill_up)
    job = Job(tmp_path / "run", on_save_error="continue")
    assert job().end == whole.end
    assert job.levels == [None]
    assert [each["step"] for each in journal(tmp_path / "run") if each["event"] == "commit"] == [4, 12, 16, 18]


def test_a_large_part_that_changes_within_a_step_is_not_used(tmp_path: Path, forward: Callable[..., None]) -> None:
    class Part:
        def __init__(self) -> None:
            self.values = torch.zeros(1 << 17)

        def state_dict(self) -> dict[str, Any]:
            return {"values": self.values}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.values = state["values"]

    def job(name: str) -> tuple[Job, list[Part]]:
        parts: list[Part] = []

        @restartable()
        def main(attempt: Attempt) -> Any:
            parts.append(Part())
            launch = made.launch = Launch(tmp_path / name, parts={"large": parts[-1]})
            train = launch.framework.train

            def counted(batch: torch.Tensor) -> torch.Tensor:
                parts[-1].values += 1
                return train(batch)

            launch.framework.train = counted  # type: ignore[method-assign]
            made.attempts.append(attempt)
            return launch()

        made = Job(tmp_path / name)
        made.main = main  # type: ignore[attr-defined]
        return made, parts

    whole, of_whole = job("whole")
    end = whole.main().end  # type: ignore[attr-defined]
    other, of_other = job("run")
    forward(other, 7)
    assert other.main().end == end  # type: ignore[attr-defined]
    assert torch.equal(of_whole[-1].values, of_other[-1].values)
    assert other.levels == [None, Level.DISK]


def with_book(monkeypatch: pytest.MonkeyPatch, begins: int) -> None:
    """Let models have a large buffer that the forward pass changes, from some step on, without torch's knowledge."""
    native = Launch.__init__

    def made(self: Launch, *arguments: Any, **options: Any) -> None:
        native(self, *arguments, **options)
        layer = self.framework.model[0]
        layer.register_buffer("book", torch.zeros(1 << 15))

        def count(module: Any, given: Any) -> None:
            if self.loop.global_step >= begins:
                layer.book.data.add_(1)

        layer.register_forward_pre_hook(count)

    monkeypatch.setattr(Launch, "__init__", made)


@pytest.mark.parametrize(("begins", "level"), [(0, Level.MEMORY), (8, Level.DISK)])
def test_a_large_buffer_that_changes_behind_the_back_of_torch_is_what_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begins: int, level: Level
) -> None:
    with_book(monkeypatch, begins)
    whole = Job(tmp_path / "whole")()
    job = Job(tmp_path / "run")
    fails_in_forward(job, 9)
    assert job().end == whole.end
    assert job.levels == [None, level]


@pytest.mark.thorough
def test_one_training_behind_another_is_held(tmp_path: Path, forward: Callable[..., None]) -> None:
    levels: list[Level | None] = []
    job = Job(tmp_path / "second")
    forward(job, 5)

    @restartable()
    def main(attempt: Attempt) -> None:
        levels.append(attempt.level)
        job.launch = None
        Launch(tmp_path / "first")()
        job.launch = Launch(tmp_path / "second")
        job.launch()

    main()
    assert levels == [None, Level.MEMORY]


def test_a_save_counts_as_a_sign_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may wait for the one before it."""
    silences: list[float] = []
    since_step: list[float] = []
    ended = 0.0
    save, end_step = PlainTorch.save, Pulse.end_step

    def saving(self: PlainTorch, directory: Path) -> None:
        attempt, now = running_attempt(), time.monotonic()
        silence = attempt and attempt.pulse.silence(now)
        silences.append(float("inf") if silence is None else silence)
        since_step.append(now - ended)
        save(self, directory)

    def ending(self: Pulse) -> None:
        nonlocal ended
        end_step(self)
        ended = time.monotonic()

    monkeypatch.setattr(PlainTorch, "save", saving)
    monkeypatch.setattr(Pulse, "end_step", ending)
    Job(tmp_path / "run", max_steps=5)()
    assert silences[0] < since_step[0]


def test_a_hook_that_fails_does_not_hide_the_failure(caplog: pytest.LogCaptureFixture) -> None:
    def abort(attempt: Attempt) -> None:
        raise ValueError("a hook")

    @restartable(abort=abort)
    def main(attempt: Attempt) -> int:
        if attempt.number == 0:
            raise OSError("lost")
        assert attempt.failure is not None and attempt.failure.message == "lost"
        return attempt.number

    assert main() == 1
    assert "ValueError: a hook" in caplog.text


def test_a_status_that_cannot_be_written_does_not_hide_the_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    native = StatusFile.write

    def write(self: StatusFile, status: RunStatus) -> None:
        if status.state is RunState.FAILED:
            raise OSError("no space left")
        native(self, status)

    monkeypatch.setattr(StatusFile, "write", write)
    job = Job(tmp_path / "run", fail_at(6))
    with pytest.raises(RuntimeError, match="lost"):
        job(max_restarts=0)
    assert "The status of the run, which is failed, could not be written: no space left" in caplog.text


def test_a_device_that_does_not_answer_is_not_waited_for() -> None:
    def fail() -> None:
        raise ValueError("an illegal address")

    devices.require_answer(lambda: None, 30)
    with pytest.raises(RuntimeError, match=r"does not answer within 0\.1 s"):
        devices.require_answer(lambda: time.sleep(5), 0.1)
    with pytest.raises(RuntimeError, match="does not answer") as found:
        devices.require_answer(fail, 30)
    assert isinstance(found.value.__cause__, ValueError)


def test_single_processes_do_not_share_memory() -> None:
    """In two containers they may have the same number, and the same memory."""
    launch = LaunchOfBlock()
    assert Meeting(launch, LIMIT).token != Meeting(launch, LIMIT).token


def test_blocks_of_one_process_do_not_share_memory() -> None:
    assert next(block._numbers) < next(block._numbers)


def test_a_rank_that_trains_nothing_yet_says_where_it_is_when_another_one_hangs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It has no run directory to write that into."""
    block.Block(BlockOptions())._log_stacks(Failure(1, None, "Hung", "rank 1 hangs", ""))
    assert "Rank 1 hangs. The threads of rank 0 are at:\nthread MainThread:" in caplog.text


def test_a_process_whose_main_thread_cannot_be_led_out_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(block.os, "_exit", ended.append)
    block.Block(BlockOptions())._abandon("leave its step", 60.0)
    assert ended == [1]
    assert "rank 0 did not leave its step within 60 s after a failure. Its process ends" in caplog.text
    assert "thread MainThread:" in caplog.text

"""A save that is copied: complete when it returns, whatever happens before its commit."""

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
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from resume_adapters import Memory
from resume_adapters.core.checkpoint.native_files import require_intact
from resume_adapters.core.ranks import SingleProcess
from resume_adapters.core.run.context import RunOptions
from resume_adapters.core.run.run import ResumableRun
from resume_adapters.core.run_directory.status import RunState
from resume_adapters.core.saving import staging
from resume_adapters.core.saving.copied import CopiedSave
from resume_adapters.core.saving.staging import StagingOptions
from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.errors import SaveFailed, UnsupportedSetting
from selection import often
from waiting import LIMIT, until

from miniature import GivenContent, committed, effects, left_behind, left_open, new_run, open_files

SIZE = 160
"""Width of a layer."""


class Slow(LocalStorage):
    """A disk on which nothing is written by parts until somebody lets it go on."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()
        self.go_on.set()

    def write_range(self, path: Path, offset: int, content: Any) -> None:
        assert self.go_on.wait(LIMIT)
        super().write_range(path, offset, content)


class Training:
    """A model that trains and saves, as a framework would: weights with safetensors, the rest with ``torch.save``.

    Args:
        stage: how saves leave the training.
        options: of :class:`ResumableRun`.
    """

    def __init__(self, directory: Path, stage: Any = "memory", **options: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), torch.nn.BatchNorm1d(SIZE))
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        self.expected: dict[str, Any] = {}
        self.disk = Slow()
        chosen = StagingOptions(stage, **options.pop("staging", {}))
        self.run = new_run(directory, **{"storage": self.disk, "staging": chosen, **options})
        self.run.open()
        self.run.begin(0, 0.0)
        self.step_number = 0

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(8, SIZE)).square().mean().backward()
        self.optimizer.step()
        self.average.update_parameters(self.model)
        self.step_number += 1

    def save(self, **options: Any) -> Path:
        """Save, and remember what the files are to hold."""
        state = {"optimizer": self.optimizer.state_dict(), "average": self.average.state_dict()}
        self.expected = clone({"model": self.model.state_dict(), **state})

        def write(directory: Path) -> None:
            safetensors.torch.save_file(self.model.state_dict(), directory / "model.safetensors")
            torch.save(state, directory / "state.pt")

        name = f"checkpoint-{self.step_number}"
        self.run.saver.save(name, self.step_number, GivenContent(write), **options)
        return self.run.directory / name

    def commit(self) -> Path:
        path = self.save()
        self.run.saver.flush()
        self.require_exact(path)
        return path

    def require_exact(self, path: Path) -> None:
        """Require that the files of a checkpoint hold what they were to hold, and that its manifest is right."""
        model = path / "model.safetensors"
        assert model.read_bytes() == safetensors.torch.save(self.expected["model"])
        saved = torch.load(path / "state.pt", weights_only=True)
        same(saved, {name: self.expected[name] for name in ("optimizer", "average")})
        for each in (model, path / "state.pt"):
            require_intact(each)
        self.run.require_valid(path)

    @property
    def decision(self) -> str:
        return self.run.saver.staging.decision

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


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    made = Training(tmp_path / "run")
    settle(made)
    yield made
    made.disk.go_on.set()
    made.run.close()


def settle(training: Training) -> None:
    """Train and save until saves are copied."""
    for _ in range(2):
        training.step()
        training.commit()
    training.step()


def test_every_save_of_a_run_is_exact(training: Training) -> None:
    for _ in range(20):
        training.step()
        training.commit()
    assert training.committed == [1, 2, *range(4, 24)]
    assert training.decision.startswith("memory: ")
    training.run.set_state(RunState.RUNNING)
    status = json.loads((training.run.directory / ".resume" / "status.json").read_bytes())
    assert status["staging"] == training.decision


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
    "all, by a load": lambda model, optimizer: model.load_state_dict(
        {name: torch.zeros_like(each) for name, each in model.state_dict().items()}
    ),
    "a storage that is gone": lambda model, optimizer: model[0].weight.untyped_storage().resize_(0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_after_a_save_has_returned_never_reaches_the_file(training: Training, change: str) -> None:
    """Law 11, with nothing that waits for it: each change is made before the first byte is written."""
    training.disk.go_on.clear()
    path = training.save()
    CHANGES[change](training.model, training.optimizer)
    assert not path.exists()
    training.disk.go_on.set()
    training.run.saver.flush()
    training.require_exact(path)


def test_a_thread_that_goes_on_writing_does_not_reach_the_file(training: Training) -> None:
    """Rows of an embedding that a thread sets, one after the other, past torch's version counter."""
    ends = threading.Event()
    rows = training.model[0].weight.data

    def write() -> None:
        number = 0
        while not ends.is_set():
            rows[number % SIZE] = number
            number += 1

    for _ in range(5):
        path = training.save()
        thread = threading.Thread(target=write)
        thread.start()
        training.run.saver.flush()
        ends.set()
        thread.join()
        ends.clear()
        training.require_exact(path)
        training.step()


def test_a_copy_is_asked_for_while_the_save_is_under_way_and_not_behind_it(training: Training) -> None:
    weight, found = training.model[0].weight, []

    def write(directory: Path) -> None:
        torch.save({"a": weight}, directory / "state.pt")
        found.append(training.run.saver.copy_of(weight.detach()))

    training.run.saver.save("checkpoint-4", 4, GivenContent(write))
    assert torch.equal(found[0], weight) and training.run.saver.copy_of(weight) is None
    training.run.saver.flush()


def test_nothing_of_torch_is_replaced_while_a_run_lasts(tmp_path: Path) -> None:
    owners = (torch.nn.Module, torch.optim.Optimizer, torch, safetensors.torch)
    before = [dict(vars(each)) for each in owners]
    training = Training(tmp_path / "run")
    settle(training)
    training.disk.go_on.clear()
    training.save()
    assert [dict(vars(each)) for each in owners] == before
    training.disk.go_on.set()
    training.run.close()


def test_a_checkpoint_has_its_name_when_it_is_whole(training: Training) -> None:
    training.disk.go_on.clear()
    path = training.save()
    assert sorted(each.name for each in path.parent.iterdir()) == [".resume", "checkpoint-1", "checkpoint-2", "latest"]
    training.disk.go_on.set()
    training.run.saver.flush()
    training.require_exact(path)


def test_a_checkpoint_that_is_saved_again_keeps_its_name_until_the_new_one_is_whole(training: Training) -> None:
    path = training.commit()
    former = (path / "model.safetensors").read_bytes()
    training.optimizer.step()
    training.disk.go_on.clear()
    training.save()
    assert (path / "model.safetensors").read_bytes() == former
    training.disk.go_on.set()
    training.run.saver.flush()
    training.require_exact(path)
    assert not list(path.parent.glob("*.superseded"))


def test_the_last_save_is_written_at_once(training: Training) -> None:
    training.disk.go_on.clear()
    path = training.save(is_last=True)
    same(safetensors.torch.load_file(path / "model.safetensors"), training.expected["model"])
    training.disk.go_on.set()
    training.run.saver.flush()
    training.require_exact(path)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_in_the_background_fails_the_commit(
    training: Training, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(training.disk, "write_range", fail)
    path = training.save()
    with pytest.raises(SaveFailed, match=os.strerror(number)):
        training.run.saver.flush()
    monkeypatch.undo()
    assert not path.exists()
    training.step()
    training.commit()
    assert training.committed == [1, 2, 4]


def test_a_thread_that_dies_is_said_and_not_waited_for(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: Any) -> Any:
        raise SystemExit

    monkeypatch.setattr(CopiedSave, "write", die)
    training.save()
    with pytest.raises(SystemExit):
        training.run.saver.flush()
    monkeypatch.undo()
    training.step()
    training.commit()


def test_a_save_of_more_files_than_descriptors_is_exact(training: Training) -> None:
    def write(directory: Path) -> None:
        for number in range(200):
            torch.save({"a": torch.full((3,), number)}, directory / f"{number}.pt")
            safetensors.torch.save_file({"a": torch.full((3,), number)}, directory / f"{number}.safetensors")

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))  # other tests of this process may have left some open
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 200, hard))
    try:
        training.run.saver.save("checkpoint-4", 4, GivenContent(write))
        training.run.saver.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    path = training.run.directory / "checkpoint-4"
    for number in range(200):
        expected = {"a": torch.full((3,), number)}
        same(torch.load(path / f"{number}.pt", weights_only=True), expected)
        same(safetensors.torch.load_file(path / f"{number}.safetensors"), expected)
    training.run.require_valid(path)


def test_a_save_that_fails_half_way_leaves_nothing_open(training: Training) -> None:
    before = open_files()

    def write(directory: Path) -> None:
        torch.save(training.optimizer.state_dict(), directory / "state.pt")
        raise OSError(5, "broken")

    with pytest.raises(SaveFailed, match="broken"):
        training.run.saver.save("checkpoint-4", 4, GivenContent(write))
    until(lambda: not left_open(before), lambda: left_open(before))
    training.commit()


def grow(training: Training) -> None:
    """Let a state be larger than the memory for its copy."""
    training.model.register_buffer("large", torch.zeros(1 << 20))
    training.average = torch.optim.swa_utils.AveragedModel(training.model)


def test_a_state_that_grows_gets_more_memory_once(training: Training) -> None:
    size = training.run.saver.staging._block.size  # type: ignore[union-attr]
    grow(training)
    training.commit()
    block = training.run.saver.staging._block
    assert block is not None and block.size > size + (8 << 20)
    for _ in range(2):
        training.step()
        training.commit()
    assert training.run.saver.staging._block is block


def test_a_state_that_grows_past_the_memory_that_is_left_gets_none(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "available_memory", lambda storage: 4_000_000)
    grow(training)
    for _ in range(2):
        training.commit()
        training.step()
    assert training.decision.startswith("off: a copy of ")


KINDS: dict[str, Callable[[], Any]] = {
    "of all dtypes": lambda: {str(each): torch.arange(5).to(each) for each in (torch.bool, torch.int8, torch.bfloat16)},
    "complex": lambda: {"a": torch.randn(3, dtype=torch.complex64)},
    "without elements": lambda: {"a": torch.empty(0), "b": torch.ones(2)},
    "views of one storage": lambda: dict(zip("ab", torch.arange(10.0).split(5), strict=True)),
    "shared": lambda: dict.fromkeys("ab", torch.ones(3)),
    "transposed": lambda: {"a": torch.randn(3, 5).T},
    "quantized": lambda: {"a": torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8)},
    "sparse": lambda: {"a": torch.eye(3).to_sparse()},
    "a parameter": lambda: {"a": torch.nn.Parameter(torch.randn(3))},
    "on no device": lambda: {"a": torch.empty(3, device="meta")},
    "numbers and text": lambda: {"a": [1, 2.5, "x", None], "b": {"c": (True,)}},
    "an array": lambda: {"a": np.arange(3)},
    "a scalar": lambda: torch.tensor(2.5),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_torch_saves_comes_back_as_it_saves_it(training: Training, kind: str, tmp_path: Path) -> None:
    obj = KINDS[kind]()
    torch.save(obj, tmp_path / "native.pt")
    training.run.saver.save("checkpoint-4", 4, GivenContent(lambda directory: torch.save(obj, directory / "state.pt")))
    training.run.saver.flush()
    ours, native = (
        torch.load(each / name, weights_only=kind != "an array")
        for each, name in ((training.run.directory / "checkpoint-4", "state.pt"), (tmp_path, "native.pt"))
    )
    assert repr(ours) == repr(native)


@pytest.mark.parametrize("kind", [each for each in KINDS if each not in ("numbers and text", "an array", "a scalar")])
def test_what_safetensors_saves_or_refuses_it_saves_or_refuses_here(
    training: Training, kind: str, tmp_path: Path
) -> None:
    obj, refused = KINDS[kind](), None
    try:
        safetensors.torch.save_file(obj, tmp_path / "native.safetensors", metadata={"format": "pt"})
    except Exception as error:
        refused = error

    def write(directory: Path) -> None:
        safetensors.torch.save_file(obj, directory / "model.safetensors", metadata={"format": "pt"})

    with contextlib.nullcontext() if refused is None else pytest.raises(SaveFailed):
        training.run.saver.save("checkpoint-4", 4, GivenContent(write))
        training.run.saver.flush()
    if refused is None:
        found = training.run.directory / "checkpoint-4" / "model.safetensors"
        assert found.read_bytes() == (tmp_path / "native.safetensors").read_bytes()


LAST: dict[str, Callable[[Any, Path], object]] = {
    "in the usual way": lambda obj, path: torch.save(obj, path),
    "in another format": lambda obj, path: torch.save(obj, path, pickle_protocol=3),
    "under another name": lambda obj, path: (torch.save(obj, f"{path}.tmp"), os.replace(f"{path}.tmp", path)),
    "under another name, in another format": lambda obj, path: (
        torch.save(obj, f"{path}.tmp", pickle_protocol=3),
        os.replace(f"{path}.tmp", path),
    ),
    "and not again": lambda obj, path: (path.unlink(), torch.save(obj, f"{path}.other")),
}


@pytest.mark.parametrize("how", LAST)
def test_a_file_that_is_written_twice_in_a_save_holds_what_was_written_last(training: Training, how: str) -> None:
    weight = training.model[0].weight.detach()
    first, last = {"a": weight, "b": torch.rand(9, 9), "c": torch.rand(300)}, {"a": torch.rand(50, 50), "b": weight * 2}

    def write(directory: Path) -> None:
        torch.save(first, directory / "state.pt")
        LAST[how](last, directory / "state.pt")

    training.run.saver.save("checkpoint-4", 4, GivenContent(write))
    training.run.saver.flush()
    path = training.run.directory / "checkpoint-4"
    (file,) = path.glob("state.pt*")
    same(torch.load(file, weights_only=True), last)
    training.run.require_valid(path)


def test_a_file_of_safetensors_that_is_written_twice_holds_what_was_written_last(training: Training) -> None:
    last = {"a": torch.rand(50, 50), "b": training.model[0].weight.detach() * 2}

    def write(directory: Path) -> None:
        safetensors.torch.save_file({"a": torch.rand(300, 300)}, directory / "model.safetensors")
        safetensors.torch.save_file(last, directory / "model.safetensors")

    training.run.saver.save("checkpoint-4", 4, GivenContent(write))
    training.run.saver.flush()
    path = training.run.directory / "checkpoint-4"
    same(safetensors.torch.load_file(path / "model.safetensors"), last)
    training.run.require_valid(path)


def test_a_file_that_is_moved_out_of_the_checkpoint_is_whole(training: Training, tmp_path: Path) -> None:
    def write(directory: Path) -> None:
        torch.save({"a": torch.arange(9)}, directory / "best.pt")
        os.replace(directory / "best.pt", tmp_path / "best.pt")
        torch.save({"a": 1}, directory / "state.pt")

    training.run.saver.save("checkpoint-4", 4, GivenContent(write))
    same(torch.load(tmp_path / "best.pt", weights_only=True), {"a": torch.arange(9)})
    training.run.saver.flush()


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
    training.run.saver.flush()
    training.require_exact(path)
    training.run.close()


# ---- However a script ends, and whatever it forks

INTERPRETER = f"""
import json, os, signal, sys, threading, time
sys.path[:0] = {[str(Path(__file__).parents[2]), str(Path(__file__).parent)]!r}
import test_copied, torch, torch._dynamo
from pathlib import Path
for line in sys.stdin:
    program, directory = json.loads(line)
    script = os.fork()
    if not script:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(script, 0)[1]), flush=True)
else:
    os._exit(0)
os.chdir(directory)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.dup2(os.open("output", os.O_CREAT | os.O_WRONLY), 1)
os.dup2(1, 2)
signal.alarm({2 * round(LIMIT)})  # a script that hangs is ended
training = test_copied.Training(Path("run").absolute())
test_copied.settle(training)
native = training.disk.write_range
def write_range(*arguments):
    time.sleep(0.1)
    native(*arguments)
training.disk.write_range = write_range
training.save()
torch.save(training.expected, "expected.pt")
exec(program)
"""
"""Forks a script for each line that it reads. It ends as an interpreter of its own, which takes seconds to start."""


@pytest.fixture(scope="module")
def interpreter() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", INTERPRETER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process


def run_script(interpreter: subprocess.Popen[str], directory: Path, program: str) -> tuple[int, str]:
    """Run a script that has a save under way; return its exit status, and what it printed."""
    assert interpreter.stdin is not None and interpreter.stdout is not None
    interpreter.stdin.write(json.dumps([program, str(directory)]) + "\n")
    interpreter.stdin.flush()
    status = int(interpreter.stdout.readline())
    return status, (directory / "output").read_text()


ENDS = {
    "at its end": ("", 0),
    "by sys.exit": ("sys.exit(3)", 3),
    "by an error": ("raise ValueError('of the script')", 1),
    "by KeyboardInterrupt": ("raise KeyboardInterrupt", -signal.SIGINT),
    "in a thread that goes on": ("threading.Thread(target=time.sleep, args=(0.2,)).start(); sys.exit(4)", 4),
    "while a daemon runs": ("threading.Thread(target=time.sleep, args=(99,), daemon=True).start(); sys.exit(5)", 5),
    "with a function at its end": ("import atexit; atexit.register(print, 'x'); sys.exit(6)", 6),
    "in a function at its end": ("import atexit; atexit.register(sys.exit, 7)", 0),
}


@pytest.mark.parametrize("end", often(ENDS))
def test_a_save_is_committed_however_the_script_ends(tmp_path: Path, interpreter: Any, end: str) -> None:
    program, expected = ENDS[end]
    status, output = run_script(interpreter, tmp_path, program)
    assert status == expected, output
    assert sorted(committed(tmp_path / "run").values()) == [1, 2, 3]
    training = Training(tmp_path / "run")
    training.expected = torch.load(tmp_path / "expected.pt", weights_only=True)
    training.require_exact(tmp_path / "run" / "checkpoint-3")
    training.run.close()


@pytest.mark.thorough
def test_a_save_that_fails_when_the_script_has_ended_is_said(tmp_path: Path, interpreter: Any) -> None:
    program = """
def full(*_):
    time.sleep(0.2)
    raise OSError(28, "No space left on device")
training.run.saver.flush()
training.disk.write_range = full
training.step()
training.save()
sys.exit(3)
"""
    status, output = run_script(interpreter, tmp_path, program)
    assert status == 3 and "its last save has failed" in output and "No space left" in output
    assert sorted(committed(tmp_path / "run").values()) == [1, 2, 3]


IN_A_CHILD = """
training.step()
training.save()
child = os.fork()
if not child:
    training.model.eval()
    list(training.model.parameters())
    training.model.load_state_dict(training.model.state_dict())
    training.optimizer.step()
    {then}
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == {status}, status
training.run.saver.flush()
training.require_exact(Path("run/checkpoint-4").absolute())
training.run.close()
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("then", "status"),
    [
        ("sys.exit(2)", 2),
        ("os._exit(2)", 2),
        ("training.run.saver.flush(); sys.exit(2)", 2),
        ("training.run.close(); os._exit(2)", 2),
        ("del training; import gc; gc.collect(); sys.exit(2)", 2),
        ("raise ValueError", 1),
    ],
)
def test_a_child_that_is_forked_behind_a_save_neither_waits_nor_touches_it(
    tmp_path: Path, interpreter: Any, then: str, status: int
) -> None:
    ended, output = run_script(interpreter, tmp_path, IN_A_CHILD.format(then=then, status=status))
    assert ended == 0, output
    assert sorted(committed(tmp_path / "run").values()) == [1, 2, 3, 4]


def test_a_kill_between_the_copy_and_the_commit_leaves_the_checkpoint_before(tmp_path: Path, interpreter: Any) -> None:
    program = "training.run.saver.flush(); training.disk.go_on.clear(); training.step(); training.save()"
    status, _ = run_script(interpreter, tmp_path, f"{program}\nos.kill(os.getpid(), signal.SIGKILL)")
    assert status == -signal.SIGKILL
    assert not (tmp_path / "run" / "checkpoint-4").exists()
    training = Training(tmp_path / "run")
    assert training.run.resumed is not None and training.run.resumed.step == 3
    training.step_number = 3
    training.step()
    training.commit()
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


# ---- Which way saves go


@contextlib.contextmanager
def decided(tmp_path: Path, stage: str, **options: Any) -> Iterator[str]:
    training = Training(tmp_path / "run", stage, **options)
    for _ in range(3):
        training.step()
        training.commit()
    assert training.run.saver.staging._block is None or not training.decision.startswith("off")
    yield training.decision
    training.run.close()


class TestDecision:
    def test_off_says_nothing(self, tmp_path: Path) -> None:
        with decided(tmp_path, "off") as decision:
            assert decision == ""

    def test_a_small_state_is_written_at_once_and_nothing_is_said(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with decided(tmp_path, "auto") as decision:
            assert decision == ""
        assert "stage" not in capsys.readouterr().err

    def test_an_objection_of_the_adapter_counts(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(staging, "_WORTH_IT", 0)
        with decided(tmp_path, "auto", staging={"objection": lambda: "a callback reads it"}) as decision:
            assert decision == "off: a callback reads it"

    @pytest.mark.parametrize("stage", ["auto", "memory"])
    def test_a_state_that_fits_is_copied_and_nothing_is_said(
        self, tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(staging, "_WORTH_IT", 0)
        with decided(tmp_path, stage) as decision:
            assert decision.startswith("memory: ")
        assert "memory" not in capsys.readouterr().err

    @pytest.mark.parametrize(("stage", "share"), [("auto", "half of the 2 MB"), ("memory", "the 1 MB")])
    def test_more_memory_than_is_left(
        self,
        tmp_path: Path,
        stage: str,
        share: str,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setattr(staging, "_WORTH_IT", 0)
        left = {"auto": 2_000_000, "memory": 1_000_000}[stage]
        monkeypatch.setattr(staging, "available_memory", lambda storage: left)
        with decided(tmp_path, stage) as decision:
            assert decision == f"off: a copy of 0.4 MB does not fit into {share} of memory left"
        assert (f'stage="memory" is {decision}.' in capsys.readouterr().err) == (stage == "memory")

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

    def test_another_system(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(os, "memfd_create")
        with decided(tmp_path, "memory") as decision:
            assert decision.startswith("off: this system")

    def test_a_save_past_torch(self, tmp_path: Path) -> None:
        run = ResumableRun(tmp_path / "run", RunOptions(staging=StagingOptions("memory")), ranks=SingleProcess())
        run.open()
        content = GivenContent(lambda directory: LocalStorage().write(directory / "model.bin", b"x"))
        for step in (1, 2, 3):
            run.saver.save(f"checkpoint-{step}", step, content)
            run.saver.flush()
        assert run.saver.staging.decision.startswith("off: nothing that is saved goes through torch.save")
        run.close()

    def test_a_word_that_is_none_is_refused(self) -> None:
        with pytest.raises(UnsupportedSetting, match='expected "auto", "memory" or "off"'):
            StagingOptions("tape")  # type: ignore[arg-type]

    def test_the_way_that_is_gone_is_refused_and_what_serves_instead_is_said(self) -> None:
        with pytest.raises(UnsupportedSetting, match=r'use "memory" where .* and "off" where it does not'):
            StagingOptions("disk")  # type: ignore[arg-type]


# ---- To memory


def test_a_save_to_memory_is_copied_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(every=100, save_every=1, directory=str(tmp_path / "memory"))
    (tmp_path / "memory").mkdir()
    training = Training(tmp_path / "run", mirror=[memory])
    tier = training.run.context.memory
    assert tier is not None
    settle(training)
    monkeypatch.setattr(training.run.saver, "save", training.run.saver.save_to_memory)
    training.disk.go_on.clear()
    name = training.save().name
    with torch.no_grad():
        training.model[0].weight.add_(1)
    training.disk.go_on.set()
    training.run.saver.flush()
    training.require_exact(tier.directory / name)
    assert sorted(committed(tier.directory).values()) == [1, 3]
    assert (training.committed, training.run.last_commit) == ([1, 2], 2)
    training.run.close()

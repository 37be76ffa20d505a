"""The files that are filled are those that the libraries write, byte for byte, whoever fills them."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import save_file

from resume_adapters.core.staging import selftest
from resume_adapters.core.staging.arena import Arena
from resume_adapters.core.staging.capture import Capture
from resume_adapters.core.staging.writer import Writer
from resume_adapters.core.storage import fill
from resume_adapters.core.storage.fill import Piece

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.uint8, torch.bool)


def trees() -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 64))
    model[2].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    base = torch.randn(10, 10)
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "views": {"a": base, "b": base[2:4], "c": base.t(), "empty": torch.empty(0), "p": torch.nn.Parameter(base + 1)},
        "dtypes": {str(each): torch.ones(5, 3).to(each) for each in DTYPES},
        "sparse": {"s": torch.eye(4).to_sparse(), "nested": [OrderedDict(x=torch.randn(3)), (torch.tensor(1.0), "s")]},
        "nested": torch.nested.nested_tensor([base, base[:3]]),
        "no tensors": {"a": 1},
        "many": [torch.full((5,), number) for number in range(3000)],
    }


@pytest.fixture
def arena() -> Iterator[Arena]:
    found = Arena(1 << 20)
    yield found
    found.close()


@pytest.fixture
def writer(arena: Arena) -> Iterator[Writer]:
    found = Writer(arena)
    yield found
    found.close()


def capture(directory: Path, arena: Arena) -> Capture:
    arena.clear()
    return Capture(directory, arena, {})


@pytest.mark.parametrize("name", trees())
@pytest.mark.parametrize("form", ["path", "file"])
def test_a_file_of_torch_save_is_the_same(tmp_path: Path, arena: Arena, writer: Writer, name: str, form: str) -> None:
    tree, native, ours = trees()[name], tmp_path / "native" / "x.pt", tmp_path / "ours" / "x.pt"
    found = capture(ours.parent, arena)
    for path, save in ((native, torch.save), (ours, lambda *given: found.torch_save(torch.save, *given))):
        path.parent.mkdir()
        if form == "path":
            save(tree, path)
        else:
            with open(path, "wb") as file:
                save(tree, file)
    for each in found.files:
        assert writer.fill(each.descriptor, each.pieces) == digest(native)
        assert each.path == Path("x.pt")
    assert ours.read_bytes() == native.read_bytes()
    assert bool(found.files) == (name not in ("nested", "no tensors"))
    found.close()


@pytest.mark.parametrize("metadata", [None, {"ä": "ö"}])
def test_a_file_of_safetensors_is_the_same(
    tmp_path: Path, arena: Arena, writer: Writer, metadata: dict[str, str] | None
) -> None:
    tensors = {f"layer.{number}": torch.ones(3, 4).to(each) for number, each in enumerate(DTYPES)}
    tensors |= {"aa": torch.randn(2), "empty": torch.empty(0, 3), "scalar": torch.tensor(1.5), "ünï": torch.randn(2)}
    native, ours = tmp_path / "native.safetensors", tmp_path / "ours.safetensors"
    save_file(tensors, native, metadata)
    found = capture(tmp_path, arena)
    found.save_file(save_file, tensors, ours, metadata)
    (each,) = found.files
    assert writer.fill(each.descriptor, each.pieces) == digest(native)
    assert ours.read_bytes() == native.read_bytes()
    found.close()


def test_what_safetensors_refuses_is_refused_in_its_words(tmp_path: Path, arena: Arena) -> None:
    tensor, found = torch.ones(4, 4), capture(tmp_path, arena)
    for tensors in ({"a": tensor, "b": tensor}, {"a": tensor.t()[1:]}, {"a": tensor.to_sparse()}):
        with pytest.raises((RuntimeError, ValueError), match=r"memory|non contiguous|sparse"):
            found.save_file(save_file, tensors, tmp_path / "x")
    assert not found.files


def test_what_does_not_fit_is_written_by_the_library(tmp_path: Path, arena: Arena) -> None:
    found, large = capture(tmp_path, arena), {"a": torch.randn(1 << 18)}
    found.save_file(save_file, large, tmp_path / "x.safetensors")
    found.torch_save(torch.save, large, tmp_path / "x.pt")
    assert not found.files and found.lacking == 2 << 20
    assert torch.equal(torch.load(tmp_path / "x.pt")["a"], large["a"])


def test_what_is_saved_elsewhere_or_in_another_way_is_not_captured(tmp_path: Path, arena: Arena) -> None:
    found, tree = capture(tmp_path / "in", arena), {"a": torch.randn(10)}
    (tmp_path / "in").mkdir()
    found.torch_save(torch.save, tree, tmp_path / "x.pt")
    found.torch_save(torch.save, tree, tmp_path / "in" / "x.pt", _use_new_zipfile_serialization=False)
    found.torch_save(torch.save, tree, fill.scratch_file())
    assert not found.files
    found.torch_save(torch.save, tree, tmp_path / "in" / "y.pt", _use_new_zipfile_serialization=True)
    assert len(found.files) == 1
    found.close()


def test_where_the_writer_has_died_this_process_goes_on(tmp_path: Path, arena: Arena, writer: Writer) -> None:
    tree = trees()["model"]
    os.kill(writer.pid, signal.SIGKILL)
    for name in ("x.pt", "y.pt"):
        torch.save(tree, tmp_path / name)
        expected = (tmp_path / name).read_bytes()
        found = capture(tmp_path, arena)
        found.torch_save(torch.save, tree, tmp_path / name)
        writer.fill(found.files[0].descriptor, found.files[0].pieces)
        assert (tmp_path / name).read_bytes() == expected
        assert not writer.is_alive
        found.close()


def test_the_writer_ignores_the_signals_of_a_scheduler_and_ends_with_the_trainer(tmp_path: Path) -> None:
    program = """
import os, signal, sys, time
from resume_adapters.core.staging.arena import Arena
from resume_adapters.core.staging.writer import Writer
from resume_adapters.core.storage import fill
arena = Arena(1 << 16)
writer = Writer(arena)
with fill.scratch_file() as file:
    writer.fill(file.fileno(), [fill.Piece(0, 0, 8)])
for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    os.kill(writer.pid, each)
with fill.scratch_file() as file:
    writer.fill(file.fileno(), [fill.Piece(0, 0, 8)])
assert writer.is_alive
status = open(f"/proc/{writer.pid}/status").read()
print(writer.pid, status.split("VmRSS:")[1].split()[0], flush=True)
if os.fork() == 0:  # as the worker of a loader, which has the socket too
    time.sleep(20)
os.kill(os.getpid(), signal.SIGKILL)
"""
    with open(tmp_path / "out", "w") as out:
        done = subprocess.run([sys.executable, "-c", program], stdout=out, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    pid, kilobytes = map(int, (tmp_path / "out").read_text().split())
    assert kilobytes < 32 << 10
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and _state(pid) != "Z" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists() or _state(pid) == "Z"


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_an_error_of_the_disk_comes_back(arena: Arena, writer: Writer) -> None:
    descriptor = os.open("/dev/full", os.O_RDWR)
    with pytest.raises(OSError, match="No space left") as raised:
        writer.fill(descriptor, [Piece(0, 0, 8)])
    assert raised.value.errno == errno.ENOSPC and writer.is_alive
    os.close(descriptor)


def test_a_stuck_writer_is_killed(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resume_adapters.core.staging.writer._PATIENCE", 0.2)
    writer = Writer(arena)
    os.kill(writer.pid, signal.SIGSTOP)
    writer.close()
    assert not Path(f"/proc/{writer.pid}").exists()


def test_a_file_that_torch_did_not_write_is_an_error(tmp_path: Path, arena: Arena) -> None:
    (tmp_path / "x").write_bytes(b"no zip")
    descriptor = fill.open_to_fill(tmp_path / "x")
    with pytest.raises(ValueError, match="not a zip file"):
        fill.fill(descriptor, [Piece("data/0", 0, 8)], arena.memory)
    os.close(descriptor)


def test_a_file_that_cannot_be_made_leaves_no_descriptor(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            fill.create_with_hole(tmp_path / "x", b"header", 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert len(os.listdir("/proc/self/fd")) == before


def test_memory_that_the_system_has_not_is_an_error() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError):
        Arena(0)
    assert len(os.listdir("/proc/self/fd")) == before


class TestSelfTest:
    def test_it_passes_here(self) -> None:
        assert selftest.is_exact()

    @pytest.mark.parametrize("name", ["_SERIALIZATION_ID", "_LOCAL_HEADER"])
    def test_it_finds_another_form_of_file(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        monkeypatch.setattr(fill, name, {"_SERIALIZATION_ID": "another", "_LOCAL_HEADER": 29}[name])
        assert not selftest.is_exact()

    def test_it_finds_a_torch_that_cannot_write_holes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(selftest, "save_with_holes", lambda *given: None)
        assert not selftest.is_exact()

    def test_it_finds_records_under_other_names(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(selftest, "save_with_holes", lambda *given: {"another/0": torch.zeros(3).untyped_storage()})
        assert not selftest.is_exact()


def digest(file: Path) -> tuple[int, str]:
    content = file.read_bytes()
    return len(content), xxhash.xxh3_128_hexdigest(content)

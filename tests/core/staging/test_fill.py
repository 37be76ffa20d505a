"""The files that are filled are those that the libraries write, byte for byte, whoever fills them."""

from __future__ import annotations

import errno
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from safetensors.torch import save_file

from resume_adapters.core.patching import wrapped
from resume_adapters.core.staging import selftest
from resume_adapters.core.staging.arena import Arena
from resume_adapters.core.staging.capture import Capture
from resume_adapters.core.staging.writer import Writer, _spawn
from resume_adapters.core.storage import fill
from resume_adapters.core.storage.fill import Piece, Record
from waiting import LIMIT, is_gone, until

from miniature import left_open, open_files

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
        "nested": {"n": torch.nested.nested_tensor([base, base[:3]])},
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


@pytest.mark.parametrize("form", ["torch", "safetensors"])
def test_what_has_filled_a_file_is_read_from_memory(tmp_path: Path, arena: Arena, writer: Writer, form: str) -> None:
    """Only what is between the tensors is read from the file."""
    tensors = {"a": torch.arange(1000.0), "b": torch.arange(7).to(torch.uint8)}
    found, path = capture(tmp_path, arena), tmp_path / "x"
    if form == "torch":
        found.torch_save(torch.save, tensors, path)
    else:
        found.save_file(save_file, tensors, path)
    (file,) = found.files
    writer.fill(file.descriptor, file.pieces)
    content = path.read_bytes()
    fill.fill_holes(file.descriptor, {each.place: memoryview(bytes(each.bytes)) for each in file.pieces})
    assert path.read_bytes() != content
    assert b"".join(fill.read_filled(file.descriptor, file.pieces, arena.memory)) == content
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
    found.save_file(save_file, tree, tmp_path / "x.safetensors")
    assert not found.files
    found.torch_save(torch.save, tree, tmp_path / "in" / "y.pt", _use_new_zipfile_serialization=True)
    assert len(found.files) == 1
    found.close()


@pytest.mark.parametrize("takes", ["all", "none", "the second"])
def test_a_file_of_torch_distributed_checkpoint_is_the_same(
    tmp_path: Path, arena: Arena, writer: Writer, takes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes an archive for each tensor into one file; of those some may find no room."""
    state = {"a": torch.randn(100, 30), "of no tensors": [1, "x"], "b": torch.randn(70), "c": torch.zeros(9)}
    native, ours, fitting = tmp_path / "native", tmp_path / "ours", iter([False, True, False])
    dcp.save(state, storage_writer=dcp.FileSystemWriter(native), no_dist=True)
    found = capture(ours, arena)
    if takes != "all":
        monkeypatch.setattr(found, "_has_room", lambda holes: takes == "the second" and next(fitting))
    with wrapped(torch, "save", found.torch_save):
        dcp.save(state, storage_writer=dcp.FileSystemWriter(ours), no_dist=True)
    assert [len(each.pieces) for each in found.files] == {"all": [3], "none": [], "the second": [1]}[takes]
    for each in found.files:
        assert each.path == Path("__0_0.distcp")
        assert writer.fill(each.descriptor, each.pieces) == digest(native / "__0_0.distcp")
        read = b"".join(fill.read_filled(each.descriptor, each.pieces, arena.memory))
        assert read == (native / "__0_0.distcp").read_bytes()
    assert (ours / "__0_0.distcp").read_bytes() == (native / "__0_0.distcp").read_bytes()
    found.close()


def test_a_file_of_several_tensors_is_the_same(tmp_path: Path, arena: Arena, writer: Writer) -> None:
    """Before torch 2.7, torch.distributed.checkpoint gives the file itself to ``torch.save``."""
    found = capture(tmp_path / "ours", arena)
    for name, save in (("native", torch.save), ("ours", lambda *given: found.torch_save(torch.save, *given))):
        (tmp_path / name).mkdir()
        with open(tmp_path / name / "x", "wb") as file:
            for tensor in (torch.ones(100), torch.arange(50)):
                save(tensor, file)
    (each,) = found.files
    assert writer.fill(each.descriptor, each.pieces) == digest(tmp_path / "native" / "x")
    assert (tmp_path / "ours" / "x").read_bytes() == (tmp_path / "native" / "x").read_bytes()
    found.close()


def test_what_is_written_again_from_some_place_on_is_captured_again(
    tmp_path: Path, arena: Arena, writer: Writer
) -> None:
    found, tensors = capture(tmp_path / "ours", arena), [torch.full((each,), each) for each in (100, 50, 70)]
    for name, save in (("native", torch.save), ("ours", lambda *given: found.torch_save(torch.save, *given))):
        (tmp_path / name).mkdir()
        with open(tmp_path / name / "x", "wb") as file:
            save(tensors[0], file)
            middle = file.tell()
            save(tensors[1], file)
            file.seek(middle)
            save(tensors[2], file)
    (each,) = found.files
    assert len(each.pieces) == 2
    assert writer.fill(each.descriptor, each.pieces) == digest(tmp_path / "native" / "x")
    found.close()


def test_what_lies_between_the_pieces_is_digested_in_parts(
    tmp_path: Path, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fill, "_CHUNK", 7)
    (tmp_path / "x").write_bytes(bytes(range(100)))
    descriptor = fill.open_to_fill(tmp_path / "x")
    assert fill.fill(descriptor, [Piece(30, 0, 20), Piece(80, 20, 4)], arena.memory) == digest(tmp_path / "x")
    os.close(descriptor)


def test_where_a_tensor_is_copied_to(tmp_path: Path, arena: Arena) -> None:
    found, small, large = capture(tmp_path, arena), torch.arange(12.0).view(3, 4), torch.zeros(1 << 15)
    found.torch_save(torch.save, {"small": small, "large": large}, tmp_path / "x.pt")
    assert torch.equal(found.copy_of(small), small)
    assert found.copy_of(small[1:]) is found.copy_of(small.t()) is None, "no tensor of the save is one of these"
    assert found.copy_of(large) is None, "torch may have made it for the save, and may free it"
    found.close()
    assert found.copy_of(small) is None


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
worker = os.fork()
if worker == 0:  # as the worker of a loader, which has the socket too
    time.sleep(600)
    os._exit(0)
print(writer.pid, status.split("VmRSS:")[1].split()[0], worker, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    with open(tmp_path / "out", "w") as out:
        done = subprocess.run([sys.executable, "-c", program], stdout=out, timeout=2 * LIMIT, check=False)
    assert done.returncode == -signal.SIGKILL
    pid, kilobytes, worker = map(int, (tmp_path / "out").read_text().split())
    try:
        assert kilobytes < 32 << 10
        until(lambda: is_gone(pid))
        assert not is_gone(worker), "the writer does not wait for it"
    finally:
        os.kill(worker, signal.SIGKILL)


def test_what_the_training_forks_meanwhile_does_not_hold_up_the_writer(tmp_path: Path) -> None:
    """A loader's workers are forked whenever a pass begins, have all that is open then, and live on."""
    program = """
import os, signal, sys, threading, time
from resume_adapters.core.staging.arena import Arena
from resume_adapters.core.staging.writer import Writer
from resume_adapters.core.storage import fill
arena, started, workers = Arena(1 << 16), [], []
def start():
    started.extend(Writer(arena) for _ in range(8))
thread = threading.Thread(target=start, daemon=True)
thread.start()
try:
    while thread.is_alive() and len(workers) < 400:
        try:
            worker = os.fork()
        except OSError:  # as many processes as are allowed
            break
        if not worker:
            time.sleep(600)
            os._exit(0)
        workers.append(worker)
    thread.join(200)
    count = len(started)
    for writer in started:
        os.kill(writer.pid, signal.SIGKILL)
        with fill.scratch_file() as file:
            writer.fill(file.fileno(), [fill.Piece(0, 0, 8)])
        assert not writer.is_alive
    print(count, flush=True)
finally:
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "8\n", done.stderr


def test_a_writer_whose_end_of_the_socket_another_process_holds(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []

    def spawn(channel: int, arena: Arena) -> int:
        held.append(os.dup(channel))
        return _spawn(channel, arena)

    monkeypatch.setattr("resume_adapters.core.staging.writer._spawn", spawn)
    writer = Writer(arena)
    os.kill(writer.pid, signal.SIGKILL)
    with fill.scratch_file() as file:
        assert writer.fill(file.fileno(), [Piece(0, 0, 8)])[0] == 8
    assert not writer.is_alive
    writer.close()
    os.close(held[0])


def test_an_answer_that_never_comes() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours, pytest.raises(EOFError, match="closed the socket"):
        fill.receive(ours, bool)


def test_a_writer_that_takes_long_is_waited_for(arena: Arena, writer: Writer) -> None:
    os.kill(writer.pid, signal.SIGSTOP)
    threading.Timer(1.2, os.kill, (writer.pid, signal.SIGCONT)).start()
    with fill.scratch_file() as file:
        size, _ = writer.fill(file.fileno(), [Piece(0, 0, 8)])
    assert size == 8 and writer.is_alive


def test_the_disk_begins_while_the_rest_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[int, int]] = []
    native = fill.let_disk_begin
    monkeypatch.setattr(fill, "let_disk_begin", lambda *part: (begun.append(part[1:]), native(*part)))
    content = memoryview(os.urandom(40 << 20))
    descriptor = fill.create_with_hole(tmp_path / "x", b"head", len(content) + 4)
    fill.fill_holes(descriptor, {4: content})
    os.close(descriptor)
    assert begun == [(0, (16 << 20) + 4), ((16 << 20) + 4, 16 << 20)]
    assert (tmp_path / "x").read_bytes() == b"head" + content


SIZES = (1 << 20, 3, (9 << 20) + 5, 4096, (2 << 20) - 1, 100)
"""Bytes of tensors: some are large enough to go past the cache of files, and hardly one begins at a block."""


@pytest.mark.parametrize("takes_blocks", [True, False])
@pytest.mark.parametrize("form", ["torch", "safetensors"])
def test_large_tensors_go_past_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, takes_blocks: bool
) -> None:
    tensors = {str(each): torch.randint(255, (each,), dtype=torch.uint8) for each in SIZES}
    passed: list[tuple[int, int]] = []
    native, pwrite = fill._write_blocks, os.pwrite

    def write_blocks(descriptor: int, passing: int, blocks: memoryview, offset: int) -> None:
        passed.append((offset, len(blocks)))
        native(descriptor, passing if takes_blocks else -1, blocks, offset)

    def refuse(descriptor: int, content: Any, offset: int) -> int:
        if descriptor == -1:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return pwrite(descriptor, content, offset)

    monkeypatch.setattr(fill, "_write_blocks", write_blocks)
    monkeypatch.setattr(os, "pwrite", refuse)
    monkeypatch.setattr(os, "major", lambda device: 8)  # whatever the tests are run on
    arena = Arena(16 << 20)
    found, ours, expected = capture(tmp_path / "ours", arena), tmp_path / "ours" / "x", tmp_path / "native" / "x"
    for each in (ours, expected):
        each.parent.mkdir()
    if form == "torch":
        found.torch_save(torch.save, tensors, ours)
        torch.save(tensors, expected)
    else:
        found.save_file(save_file, tensors, ours)
        save_file(tensors, expected)
    (file,) = found.files
    assert fill.fill(file.descriptor, file.pieces, arena.memory) == digest(expected)
    assert ours.read_bytes() == expected.read_bytes()
    assert bool(passed) == _has_direct_writes(tmp_path)
    assert all(offset % fill._BLOCK == size % fill._BLOCK == 0 for offset, size in passed)
    found.close()
    arena.close()


def _has_direct_writes(directory: Path) -> bool:
    try:
        os.close(os.open(directory / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_an_error_of_the_disk_past_the_cache_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail(descriptor: int, content: Any, offset: int) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(OSError) as raised:
        fill._write_past_cache(-1, -1, [(5, memoryview(bytes(3 << 20)))], bool)
    assert raised.value.errno == code


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
        fill.fill(descriptor, [Piece(Record("data/0"), 0, 8)], arena.memory)
    os.close(descriptor)


def test_a_file_that_cannot_be_made_leaves_no_descriptor(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = open_files()
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            fill.create_with_hole(tmp_path / "x", b"header", 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    until(lambda: not left_open(before), lambda: left_open(before))


def test_memory_that_the_system_has_not_is_an_error() -> None:
    before = open_files()
    with pytest.raises(OSError):
        Arena(0)
    until(lambda: not left_open(before), lambda: left_open(before))


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

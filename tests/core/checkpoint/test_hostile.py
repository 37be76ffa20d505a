"""Run directories that somebody made to crash a start, to stop it for ever, or to write somewhere else."""

from __future__ import annotations

import errno
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from resume_adapters.core.checkpoint.native_files import read_native, require_intact
from resume_adapters.core.run_directory.journal import Journal
from resume_adapters.core.storage import local
from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.errors import CheckpointDamaged, ResumeError, RunDirectoryUnusable

from miniature import Miniature

STORAGE = LocalStorage()
DEEP = "[" * 100_000 + "]" * 100_000


def saved(directory: Path, *steps: int) -> Path:
    job = Miniature(directory)
    for step in steps:
        job.commit(step)
    job.run.close()
    return directory


def forge(checkpoint: Path, file: str, content: bytes) -> None:
    """Replace a file, and let the manifest agree."""
    (checkpoint / file).write_bytes(content)
    manifest = checkpoint / "resume" / "manifest.json"
    record = json.loads(manifest.read_bytes())["manifest"]
    for entry in record["files"]:
        if entry["path"] == file:
            entry.update(bytes=len(content), digest=xxhash.xxh3_128_hexdigest(content))
    write_manifest(manifest, json.dumps(record))


def write_manifest(manifest: Path, record: str) -> None:
    manifest.write_text(f'{{"digest":"{xxhash.xxh3_128_hexdigest(record.encode())}","manifest":{record}}}')


@pytest.mark.parametrize(
    "document",
    [
        *('{"text"', DEEP, f'{{"text":{DEEP}}}', '{"text":{"$":"none","of":1}}', '{"text":{"$":["x"]}}'),
        *('{"text":{"$":"tensor"}}', '{"text":{"$":"tensor","key":"x"}}', '{"text":{"$":"array","of":3}}'),
        *('{"text":{"$":"dict","of":[[[],1]]}}', '{"text":{"$":"dtype","of":"nn"}}', '{"text":{"$":"complex","of":1}}'),
        *('{"text":{"$":"int","of":"%s"}}' % ("9" * 5000), '{"text":{"$":"device","of":[]}}', "\xff"),
    ],
    ids=range(14),
)
def test_a_part_that_agrees_with_its_digest_and_is_no_tree_is_damaged(tmp_path: Path, document: str) -> None:
    run = saved(tmp_path, 10, 20)
    forge(run / "checkpoint-20", "resume/rank-00000.json", document.encode("latin-1"))
    job = Miniature(run)
    assert (job.step, job.text) == (10, "state at 10")
    assert "rank-00000.json does not fit" in job.choice.rejected[0].reason


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, b"\x08" + b"\0" * 7 + b"{}      "])
def test_tensors_that_agree_with_their_digest_and_are_none_are_damaged(tmp_path: Path, content: bytes) -> None:
    run = saved(tmp_path, 10, 20)
    forge(run / "checkpoint-20", "resume/ema.safetensors", content)
    job = Miniature(run)
    assert job.step == 10 and "ema.json does not fit ema.safetensors" in job.choice.rejected[0].reason


@pytest.mark.parametrize(
    "fields",
    [
        {"world_size": 0},
        {"world_size": 1 << 40},
        {"step": -1},
        {"step": 1 << 70},
        {"generation": "x"},
        {"files": [{"path": "a\0", "bytes": 1, "digest": ""}]},
        {"files": [{"path": "a", "bytes": -1, "digest": ""}]},
        {"files": [{"path": "a" * 5000, "bytes": 1, "digest": ""}]},
        {"files": [{"path": "a" * 256, "bytes": 1, "digest": ""}]},
        {"files": [{"path": "a/" * 600 + "a", "bytes": 1, "digest": ""}]},
        {"files": [{"path": "a/", "bytes": 1, "digest": ""}]},
        {"files": [{"path": ".", "bytes": 1, "digest": ""}]},
        {"files": [{"path": "./a", "bytes": 1, "digest": ""}]},
        {"files": [{"path": "a", "bytes": 1, "digest": ""}, {"path": "a/b", "bytes": 1, "digest": ""}]},
        {"files": [{"path": f"{each}", "bytes": 1 << 40, "digest": ""} for each in range(1025)]},
        {"files": [{"path": "model.bin", "bytes": 1, "digest": ""}] * 2},
        {"metrics": DEEP},
    ],
    ids=range(17),
)
def test_a_manifest_of_impossible_numbers_is_damaged(tmp_path: Path, fields: dict[str, Any]) -> None:
    run = saved(tmp_path, 10, 20)
    manifest = run / "checkpoint-20" / "resume" / "manifest.json"
    record = {**json.loads(manifest.read_bytes())["manifest"], **fields}
    write_manifest(manifest, json.dumps(record).replace(f'"{DEEP}"', DEEP))
    job = Miniature(run)
    assert job.step == 10 and job.choice.rejected[0].path.name == "checkpoint-20"


def test_what_is_not_a_regular_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        for work in (STORAGE.read, STORAGE.digest, STORAGE.size):
            with pytest.raises(OSError, match=r"is not a regular file|Is a directory"):
                work(name)
    for write in (STORAGE.write, STORAGE.append):
        with pytest.raises(OSError):
            write(tmp_path / "pipe", b"x")
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError) as large:
        STORAGE.read(tmp_path / "sparse")
    assert large.value.errno == errno.EFBIG
    assert not any(STORAGE.exists(tmp_path / name) for name in ("a" * 300, "null\0", "pipe/within"))


def test_a_permission_that_is_missing_is_not_taken_for_a_missing_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = saved(tmp_path, 10)
    (run / "private").mkdir()
    native = os.stat

    def stat(path: Any, **options: Any) -> os.stat_result:
        if "private" in str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return native(path, **options)

    monkeypatch.setattr(local.os, "stat", stat)
    with pytest.raises(RunDirectoryUnusable, match="Permission denied"):
        Miniature(run)


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    run, outside = saved(tmp_path / "run", 10), tmp_path / "outside"
    outside.touch()
    (tmp_path / "link").symlink_to(outside)
    for write in (STORAGE.write, STORAGE.append):
        with pytest.raises(OSError):
            write(tmp_path / "link", b"x")
    for name in (".resume/journal.jsonl", ".resume/set-aside", ".resume"):
        kept = (run / name).with_name("kept")
        if (run / name).exists():
            (run / name).rename(kept)
        (run / name).symlink_to(outside)
        with pytest.raises(RunDirectoryUnusable, match=r"symbolic link to .*remove it"):
            Miniature(run)
        (run / name).unlink()
        if kept.exists():
            kept.rename(run / name)
    assert outside.read_bytes() == b"" and Miniature(run).step == 10


def test_names_and_links_of_every_kind_are_no_checkpoints(tmp_path: Path) -> None:
    run = saved(tmp_path, 10)
    for number, target in enumerate(("/", "/dev/zero", ".", "..", "a" * 255, "x4.ckpt", "/proc/self/fd/0")):
        (run / f"x{number}.ckpt").symlink_to(target)
    for name in ("odd\udcff", "odd\udcff.ckpt", "a" * 250, "checkpoint-" + "9" * 240):
        (run / name).mkdir()
    os.mkfifo(run / "pipe.ckpt")
    job = Miniature(run)
    assert (job.step, job.choice.rejected) == (10, ())
    job.commit(20)
    assert Miniature(run).step == 20


@pytest.mark.parametrize(
    "line", [DEEP, '{"event":1,"time":1}', '{"event":"commit","time":1,"step":[],"checkpoint":{}}', "\0"]
)
def test_a_line_of_the_journal_that_is_none_is_passed_over(tmp_path: Path, line: str) -> None:
    run = saved(tmp_path, 10)
    with (run / ".resume" / "journal.jsonl").open("a") as file:
        file.write(
            line + "\n" + '{"event":"start","time":1,"set_aside":[[]]}\n{"event":"prune","time":1,"checkpoint":3}\n'
        )
    assert Journal(STORAGE, run / ".resume", float).committed().has("checkpoint-10")
    assert Miniature(run).step == 10


def test_a_native_file_that_is_none_is_damaged(tmp_path: Path) -> None:
    file = tmp_path / "optimizer.pt"
    torch.save([1], file)
    with pytest.raises(CheckpointDamaged, match="holds a list, expected a dict"):
        read_native(file)
    for content in (b"", b"\x80\x04K\x01.", b"PK"):
        file.write_bytes(content)
        with pytest.raises(CheckpointDamaged, match="cannot be read"):
            read_native(file)
        with pytest.raises(ResumeError):
            require_intact(file)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x/data.pkl", b"cos\nsystem\n(S'touch ran'\ntR.")
    with pytest.raises(CheckpointDamaged, match="cannot be read"):
        read_native(file)


def test_an_archive_that_would_fill_the_memory_is_damaged(tmp_path: Path) -> None:
    """One of a megabyte can hold a gigabyte of zeros, or name one entry a thousand times; and torch does not ask."""
    run = saved(tmp_path / "run", 10, 20)
    file = tmp_path / "optimizer.pt"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", bytes(1 << 20))
    forge(run / "checkpoint-20", "model.bin", file.read_bytes())
    job = Miniature(run)
    assert job.step == 10 and "would be read as 1,048,576 bytes" in job.choice.rejected[0].reason
    with pytest.raises(CheckpointDamaged, match="more than it has"):
        require_intact(file)

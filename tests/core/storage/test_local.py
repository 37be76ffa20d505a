"""The local disk: what is written piece by piece does not wait in the system's cache."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import xxhash

from resume_adapters.core.storage import local
from resume_adapters.core.storage.base import remove_tree, write_pieces
from resume_adapters.core.storage.local import LocalStorage

from faults import Disturbed


def test_the_disk_begins_with_each_piece_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[int, int]] = []
    monkeypatch.setattr(local, "_sync_file_range", lambda: lambda *part: begun.append(part[1:3]))
    found = write_pieces(LocalStorage(), tmp_path / "file", [b"abc", b"de"])
    assert begun == [(0, 3), (3, 2)]
    assert (tmp_path / "file").read_bytes() == b"abcde" and found == LocalStorage().digest(tmp_path / "file")


@pytest.mark.parametrize("seed", range(20))
def test_what_takes_no_place_on_the_disk_counts_as_zeros(tmp_path: Path, seed: int) -> None:
    draw, file = random.Random(seed), tmp_path / "file"
    size = draw.randrange(1 << 23)
    with file.open("wb") as target:
        target.truncate(size)
        for _ in range(draw.randrange(5)):
            target.seek(draw.randrange(size + 1))
            target.write(draw.randbytes(draw.randrange(1 << 16)))
    expected = xxhash.xxh3_128_hexdigest(file.read_bytes())
    assert LocalStorage().digest(file, skip_holes=True) == (file.stat().st_size, expected)


def test_a_file_that_claims_to_be_large_costs_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    os.truncate(tmp_path / "file", 8 << 30)
    calls: list[int] = []
    seek = os.lseek
    monkeypatch.setattr(os, "lseek", lambda *arguments: calls.append(seek(*arguments)) or calls[-1])
    assert LocalStorage().digest(tmp_path / "file", skip_holes=True)[0] == 8 << 30
    assert calls == [8 << 30], "there was one hole, and nothing to read in it"


def test_a_directory_that_another_start_removes_meanwhile_is_removed(tmp_path: Path) -> None:
    (tmp_path / "leftover").mkdir()
    raced = Disturbed(lambda operation, path: operation == "entries" and os.rmdir(path))  # just before it is listed
    assert remove_tree(raced, tmp_path / "leftover") is None
    assert os.listdir(tmp_path) == []


def test_a_link_that_goes_while_it_is_followed_leads_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning removes its ``last`` while the retention of this package looks for links."""
    link = tmp_path / "last"
    link.symlink_to("target")
    native = os.readlink

    def readlink(path: str) -> str:
        link.unlink()
        return native(path)

    monkeypatch.setattr(os, "readlink", readlink)
    assert LocalStorage().real_path(link) == link

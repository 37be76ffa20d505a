"""A run says where there is no room for the checkpoints to come, as soon as it knows their size."""

from __future__ import annotations

from pathlib import Path

import pytest

from resume_adapters.core.run_directory.upkeep import format_bytes
from resume_adapters.core.storage.local import LocalStorage

from miniature import Miniature


class Small(LocalStorage):
    free = 0

    def free_bytes(self, path: Path) -> int:
        assert super().free_bytes(path) > 0
        return self.free


def test_a_run_warns_where_there_is_no_room_for_two_checkpoints(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage = Small()
    first = Miniature(tmp_path, storage=storage)
    first.run.begin(0, 0.0)
    assert "expected room" not in caplog.text, "the size is not known"
    first.commit(10)
    first.commit(15)
    first.run.close()
    assert caplog.text.count("has 0 B free") == 1
    caplog.clear()
    job = Miniature(tmp_path, storage=storage)
    assert job.choice.checkpoint is not None and job.choice.checkpoint.manifest is not None
    size = job.choice.checkpoint.manifest.bytes
    for storage.free in (2 * size, 2 * size - 1):
        job.run.begin(10, 1.0)
        job.run.close()
        assert ("expected room for two" in caplog.text) == (storage.free < 2 * size)
    assert f"has {format_bytes(2 * size - 1)} free, and a checkpoint takes {format_bytes(size)}" in caplog.text


def test_bytes_have_three_digits_and_a_unit() -> None:
    assert [format_bytes(count) for count in (0, 999, 1000, 1_420_000_000, 10**16)] == [
        "0 B",
        "999 B",
        "1 kB",
        "1.42 GB",
        "1e+04 TB",
    ]

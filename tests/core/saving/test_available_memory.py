"""What is left of memory is what the tightest of the machine and its control groups leaves."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from resume_adapters.core.saving.block import available_memory
from resume_adapters.core.storage.local import LocalStorage

GB = 1 << 30


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 100 * GB}))


def lay(root: Path, files: dict[str, object]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")


def test_without_groups_it_is_the_machines(tmp_path: Path) -> None:
    assert available_memory(LocalStorage(), tmp_path) == 100 * GB


@pytest.mark.parametrize("group", ["", "slurm/job_7/", "slurm/"])
def test_a_group_of_version_2_and_each_above_it_counts(tmp_path: Path, group: str) -> None:
    lay(
        tmp_path,
        {
            "proc/self/cgroup": "0::/slurm/job_7",
            "sys/fs/cgroup/slurm/job_7/memory.max": "max",
            f"sys/fs/cgroup/{group}memory.max": 8 * GB,
            f"sys/fs/cgroup/{group}memory.current": 7 * GB,
            f"sys/fs/cgroup/{group}memory.stat": f"anon 5\ninactive_file {2 * GB}",
        },
    )
    assert available_memory(LocalStorage(), tmp_path) == 3 * GB


def test_a_group_of_version_1_counts(tmp_path: Path) -> None:
    lay(
        tmp_path,
        {
            "proc/self/cgroup": "3:cpu,cpuacct:/a\n2:memory:/docker/x\n0::/",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": 4 * GB,
            "sys/fs/cgroup/memory/memory.usage_in_bytes": 5 * GB,
            "sys/fs/cgroup/memory/memory.stat": "cache 5",
        },
    )
    assert available_memory(LocalStorage(), tmp_path) == 0

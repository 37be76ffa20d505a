"""On Windows the package can be imported, and a run is refused before anything is written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from resume_adapters.core.requirements import require_platform
from resume_adapters.errors import UnsupportedSetting

WITHOUT = (
    "SIGUSR1",
    "SIGUSR2",
    "SIGKILL",
    "SIGSTOP",
    "SIGCONT",
    "SIGALRM",
    "SIGHUP",
    "pthread_kill",
    "pthread_sigmask",
)

PROGRAM = f"""
import asyncio, importlib, multiprocessing, os, pathlib, signal, subprocess, sys, tempfile
import msgspec, numpy, packaging.version, psutil, rich.console, safetensors.torch, torch, typer, xxhash
import torch.distributed.checkpoint, torch.utils.data
for name in {WITHOUT!r}:
    delattr(signal, name)
for name in ("register_at_fork", "fork", "geteuid", "getuid"):
    delattr(os, name)
sys.modules.update(fcntl=None, pwd=None, grp=None, resource=None, termios=None)
sys.platform = "win32"
import resume_adapters
package = pathlib.Path(resume_adapters.__file__).parent
for folder in ("core", "cli"):
    for file in sorted((package / folder).rglob("*.py")):
        if file.name != "__main__.py":
            importlib.import_module(".".join(["resume_adapters", *file.relative_to(package).with_suffix("").parts]))
from resume_adapters.core.run.run import ResumableRun
assert len(resume_adapters.StopOn().signals) == 2
try:
    ResumableRun(sys.argv[1])
except resume_adapters.ResumeError as error:
    print(error)
"""


def test_it_is_imported_and_refuses_to_train(tmp_path: Path) -> None:
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  # torch would import the package too early
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path / "run"], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("resume-adapters does not train on Windows")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_others_are_not_refused(platform: str) -> None:
    require_platform(platform)
    with pytest.raises(UnsupportedSetting, match="WSL 2"):
        require_platform("win32")

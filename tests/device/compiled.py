"""Which device the tests train on, and how their own is compiled: once for each version of it and of torch."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

NAME = "walled"

DEVICE = os.environ.get("RESUME_ADAPTERS_DEVICE", NAME)
"""What jobs train on that are to train on a device: ``nox -s accelerator`` gives that of the machine."""

GROUP = f"{NAME}_group"

_SOURCES = {NAME: Path(__file__).with_name("device.cpp"), GROUP: Path(__file__).with_name("group.cpp")}

_COMPILE = """
import sys
from torch.utils import cpp_extension
name, source, directory, is_python = sys.argv[1:]
cpp_extension.load(
    name, [source], extra_cflags=["-O0"], is_python_module=is_python == "True", build_directory=directory
)
"""


def library(name: str = NAME) -> Path:
    """Return where the compiled device is, or will be, or its process group: outside of the tree, by its source."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "resume-adapters-tests"
    digest = hashlib.sha256(_SOURCES[name].read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    return cache / f"{name}-{digest}.so"


def build(name: str) -> None:
    """Compile the device or its process group, if it is not there yet; some 20 s. Of several processes, one does it.

    Raises:
        RuntimeError: there is no compiler, no ninja, or no headers of torch.
    """
    built = library(name)
    built.parent.mkdir(parents=True, exist_ok=True)
    with built.with_suffix(".lock").open("w") as lock, tempfile.TemporaryDirectory(dir=built.parent) as directory:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if built.exists():
            return
        # Torch loads what it compiles, and this process is to have no accelerator. Ninja may be beside Python alone.
        search = os.pathsep.join([os.environ["PATH"], str(Path(sys.executable).parent)])
        command = [sys.executable, "-c", _COMPILE, name, str(_SOURCES[name]), directory, str(name == GROUP)]
        done = subprocess.run(command, env={**os.environ, "PATH": search}, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        os.replace(Path(directory) / f"{name}.so", built)


@functools.cache
def _why_not(count: int) -> str:
    if DEVICE != NAME:
        found = torch.accelerator.current_accelerator(check_available=True)
        has = torch.accelerator.device_count() if found and found.type == DEVICE else 0
        return "" if has >= count else f"this machine has {has} {DEVICE} devices that torch can use, of {count}"
    try:
        for each in _SOURCES:
            build(each)
    except RuntimeError as error:
        return f"the test device cannot be compiled: {error}"
    return ""


def require_device(count: int = 1) -> None:
    """Skip the test where there are fewer such devices; fail for the first, where RESUME_ADAPTERS_REQUIRE names it."""
    if reason := _why_not(count):
        required = os.environ.get("RESUME_ADAPTERS_REQUIRE", "").split(",") if count == 1 or DEVICE == NAME else []
        (pytest.fail if "device" in required else pytest.skip)(reason)


def require_test_device() -> None:
    """Skip the test where there is no test device, as :func:`require_device` does, or where another one is used."""
    if DEVICE != NAME:
        pytest.skip(f"its ranks have a test device each, and this session uses {DEVICE}")
    require_device()

"""Compiles the test device, once for each version of it and of torch."""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

NAME = "walled"
_SOURCE = Path(__file__).with_name("device.cpp")


def library() -> Path:
    """Return where the compiled device is, or will be: outside of the tree, by what it is compiled from."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "resume-adapters-tests"
    digest = hashlib.sha256(_SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    return cache / f"{NAME}-{digest}.so"


def build() -> None:
    """Compile the device, if it is not there yet; some 15 s.

    Raises:
        RuntimeError: there is no compiler, or no headers of torch.
        OSError: the same.
    """
    from torch.utils import cpp_extension

    built = library()
    if built.exists():
        return
    built.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=built.parent) as directory:
        how: dict[str, Any] = {"extra_cflags": ["-O0"], "is_python_module": False, "build_directory": directory}
        cpp_extension.load(NAME, [str(_SOURCE)], **how)
        os.replace(Path(directory) / f"{NAME}.so", built)


@functools.cache
def _why_not() -> str:
    try:
        build()
    except (OSError, RuntimeError) as error:  # no compiler, no headers of torch, no ninja
        return f"the test device cannot be compiled: {error}"
    return ""


def require_device() -> None:
    """Skip the test where the device cannot be compiled; fail, where RESUME_ADAPTERS_REQUIRE names it."""
    if reason := _why_not():
        is_required = "device" in os.environ.get("RESUME_ADAPTERS_REQUIRE", "").split(",")
        (pytest.fail if is_required else pytest.skip)(reason)

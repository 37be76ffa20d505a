"""DeepSpeed's C++ optimizers, compiled once for all tests and loaded by the server that forks the jobs.

Importing this module does it. DeepSpeed compiles an operator when it is first used, which takes most of a minute. A
kill meanwhile leaves a file ``lock``, and whoever uses the operator next waits for it forever. So nothing is compiled
in a job, and the directory of the compiled operators is used under a lock of its own, which the system takes back.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path

import cpuinfo
import deepspeed
import torch
from deepspeed.ops.op_builder import CPUAdamBuilder, FusedAdamBuilder
from filelock import FileLock

_VERSIONS = f"python{sys.version_info.major}.{sys.version_info.minor}-torch{torch.__version__}-{deepspeed.__version__}"
DIRECTORY = Path(__file__).parents[1] / ".torch_extensions" / _VERSIONS


def load() -> None:
    """Compile what is not compiled yet, load it into this process, and remember what the processor is."""
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    os.environ["TORCH_EXTENSIONS_DIR"] = str(DIRECTORY)
    with FileLock(DIRECTORY / "in-use"):
        for left_by_a_kill in DIRECTORY.glob("*/lock"):
            left_by_a_kill.unlink()
        for builder in (CPUAdamBuilder(), FusedAdamBuilder()):
            # Half the time: what a step computes is in intrinsics, and nobody debugs it here.
            builder.cxx_args = functools.partial(_with, builder.cxx_args, "-O1", "-g0")
            builder.load(verbose=False)
    # Each DeepSpeedCPUAdam asks for it anew, which takes a second.
    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    cpuinfo.get_cpu_info()


def _with(arguments: Callable[[], list[str]], *more: str) -> list[str]:
    return [*arguments(), *more]


load()

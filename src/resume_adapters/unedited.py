"""Resume for scripts that nobody edits: what ``RESUME_ADAPTERS=1`` does in each process that imports torch.

``resume-adapters run`` sets that variable for the command that it starts, and puts :data:`ENTRY` on its ``PYTHONPATH``.
From there it takes two ways into a process, both of them entry points that lie in that directory:

==============  ====================================================================================================
framework       way in
==============  ====================================================================================================
Lightning       asks ``lightning.pytorch.callbacks_factory`` for callbacks when it makes a Trainer, or the group of
                that name of ``pytorch_lightning``
transformers    has no such group; torch calls ``torch.backends`` at the end of its import, which is before any Trainer
                exists, and :func:`begin` then waits for ``transformers.trainer``
==============  ====================================================================================================

Each adapter has a ``CallbackOfEnvironment``, which leaves a trainer alone that has a callback of its own, or that saves
nothing. A loop without a Trainer cannot be reached, and :class:`LoopWatch` says so.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from resume_adapters.core.log import logger

VARIABLE = "RESUME_ADAPTERS"
"""Set to 1, every Trainer of transformers and Lightning gets a callback with which it resumes."""

ENTRY = Path(__file__).parent / "entry"
"""The directory of the entry points."""

_OWN = tuple(f"resume_adapters.{name}" for name in ("accelerate", "deepspeed", "fabric", "loop"))
"""What a script imports that makes its hand-written loop resume by itself."""

_REMEDY = (
    "RESUME_ADAPTERS=1 reaches the Trainers of transformers and Lightning. A loop that a script writes itself needs a "
    "few lines of its own: see the page of its framework (Accelerate, DeepSpeed, or a plain PyTorch loop)."
)


def reaching(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which the Trainers of each process resume."""
    path = os.pathsep.join(filter(None, [str(ENTRY), environment.get("PYTHONPATH")]))
    return {**environment, VARIABLE: "1", "PYTHONPATH": path}


def begin() -> None:
    """Add a callback to each Trainer of transformers, once its module is imported, and watch for other loops."""
    sys.meta_path.insert(0, AfterImport("transformers.trainer", _install))
    _WATCH.begin()


def _install() -> None:
    importlib.import_module("resume_adapters.hf.unedited").install()


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function right after a module was imported for the first time.

    Args:
        module: the name of the module.
        then: the function.
    """

    def __init__(self, module: str, then: Callable[[], None]) -> None:
        self._module = module
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find nothing but that module, as the other finders do, and find it once."""
        if fullname != self._module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        loader = _LoaderWithSequel(spec.loader, self._then)
        return importlib.util.spec_from_file_location(fullname, spec.origin, loader=loader)


class _LoaderWithSequel(importlib.abc.Loader):
    """Loads a module as its own loader does, and then calls a function."""

    def __init__(self, native: Any, then: Callable[[], None]) -> None:
        self._native = native
        self._then = then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Make the module as its own loader does."""
        made: ModuleType | None = self._native.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module, and call the function."""
        self._native.exec_module(module)
        self._then()


class LoopWatch:
    """Says that a process trains without a Trainer: at its first backward pass, and again when the process ends.

    Not at a step of an optimizer: fastai's, and those of scripts, are not torch's.
    """

    def __init__(self) -> None:
        self._is_over = False

    def begin(self) -> None:
        """Wait for the first backward pass."""
        import torch

        native = torch.autograd.backward

        @functools.wraps(native)
        def backward(*args: Any, **kwargs: Any) -> None:
            if torch.autograd.backward is backward:  # and no other package has wrapped it since
                torch.autograd.backward = native
            self._trains()
            native(*args, **kwargs)

        torch.autograd.backward = backward

    def dismiss(self) -> None:
        """Stop looking: there is a Trainer."""
        self._is_over = True
        atexit.unregister(self._say_at_exit)

    def _trains(self) -> None:
        if self._is_over or any(name in sys.modules for name in _OWN):
            return
        self._is_over = True
        logger.warning("No Trainer was made in this process, and it trains: this run does not resume. %s", _REMEDY)
        atexit.register(self._say_at_exit)

    def _say_at_exit(self) -> None:
        logger.warning("No Trainer was made in this process: this package saves and resumes nothing. %s", _REMEDY)


_WATCH = LoopWatch()


def trainer_was_made() -> None:
    """End the watch for hand-written loops: this process has a Trainer."""
    _WATCH.dismiss()

"""Which way saves leave the training: through a copy in memory, or not at all.

The first save of a launch is written by the framework, and the training waits: only then is its size known. The memory
for the next ones is made behind it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from resume_adapters.core.choices import Stage
from resume_adapters.core.patching import wrapped
from resume_adapters.core.saving.block import Block, available_memory
from resume_adapters.core.saving.copied import CopiedSave
from resume_adapters.core.storage.base import Storage
from resume_adapters.errors import UnsupportedSetting

_WORTH_IT = 16 << 20
"""Bytes of a save from which on ``"auto"`` copies it: a smaller one takes some milliseconds in any case."""

_SPARE = 1 << 20
"""Bytes by which the memory is larger than the files, which grow a little."""


@dataclass(frozen=True)
class StagingOptions:
    """What an adapter knows of the saves of its framework.

    Attributes:
        stage: what the user wants.
        objection: returns why ``"auto"`` is ``"off"`` for this training; empty: nothing speaks against it.
        writers: functions that are safetensors' ``save_file`` under names of the framework: module and name.

    Raises:
        UnsupportedSetting: ``stage`` is not one of its words.
    """

    stage: Stage = "off"
    objection: Callable[[], str] = str
    writers: Sequence[tuple[Any, str]] = ()

    def __post_init__(self) -> None:
        if str(self.stage) == "disk":
            raise UnsupportedSetting(
                'stage="disk" is no longer there: use "memory" where a copy of the state fits into memory, and "off" '
                'where it does not; "auto" chooses between them'
            )
        if self.stage not in get_args(Stage):
            raise UnsupportedSetting(f'stage={self.stage!r} is invalid: expected "auto", "memory" or "off"')


class Staging:
    """Copies the saves of one start of a run.

    Args:
        options: what the adapter knows.
        storage: reads what the system says of its memory.
        ranks_here: processes of the run on this machine, which share its memory.
        say: is called with the reason where there is no copy, and one was asked for.

    Attributes:
        decision: which way saves go, and why; empty where there is nothing to say of it.
    """

    def __init__(
        self, options: StagingOptions, storage: Storage, ranks_here: int, say: Callable[[str], object]
    ) -> None:
        self.decision = ""
        self._options = options
        self._storage = storage
        self._ranks_here = ranks_here
        self._say = say
        self._block: Block | None = None
        self._size = 0
        self._copies_nothing = False
        self._current: CopiedSave | None = None

    def switch_off(self, reason: str) -> None:
        """Copy nothing, and say why where the user wants it."""
        if self._options.stage == "memory":
            self._say(f"off: {reason}")
        self.decision = "" if self._options.stage == "off" else f"off: {reason}"
        self._options = replace(self._options, stage="off")

    @contextlib.contextmanager
    def copying(self, directory: Path) -> Iterator[CopiedSave | None]:
        """Return the context in which a framework writes a checkpoint; it has what is copied of that, if anything is.

        The save before must be committed: its copy is in the same memory.

        Args:
            directory: where the framework writes: a directory, or one file.
        """
        # A file that is still to be written takes no room, and a disk that is full is found by a save that waits.
        if self._block is None or self._storage.free_bytes(directory.parent) < self._size:
            yield None
            return
        import safetensors.torch
        import torch

        self._current = save = CopiedSave(directory, self._block)
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(wrapped(torch, "save", save.torch_save))
                for module, name in ((safetensors.torch, "save_file"), *self._options.writers):
                    stack.enter_context(wrapped(module, name, save.save_file))
                yield save
            save.end()
        except BaseException:
            save.abandon()
            raise
        self._copies_nothing = save.is_empty and not save.lacks_room

    def copy_of(self, tensor: Any) -> Any:
        """Return the copy of a tensor in the save under way; ``None`` where it has none."""
        return None if self._current is None else self._current.copy_of(tensor)

    def end_save(self) -> CopiedSave | None:
        """Return what was copied of the save under way, which ends: what the tensors hold from now on may be other."""
        ended, self._current = self._current, None
        return ended

    # ---- On the thread that commits

    def prepare(self, size: int) -> None:
        """Make what the next save needs, once the size of one is known.

        Args:
            size: bytes of the framework's files that this rank wrote.
        """
        self._size = size
        fits = self._block is not None and size <= self._block.size - _SPARE // 2
        if self._options.stage == "off" or (fits and not self._copies_nothing):
            return
        self.close()
        decision = self._decide(size)
        if decision != self.decision:
            self.decision = decision
            if self._options.stage == "memory" and self._block is None:  # the rest is no news: the status has it
                self._say(decision)

    def _decide(self, size: int) -> str:
        """Make the memory, or return why there is none."""
        is_auto, megabytes = self._options.stage == "auto", f"{size / 1e6:,.{0 if size >= 1e7 else 1}f} MB"
        if is_auto and size < _WORTH_IT:
            return ""
        if self._copies_nothing:
            return "off: nothing that is saved goes through torch.save or safetensors"
        if is_auto and (objection := self._options.objection()):
            return f"off: {objection}"
        available = available_memory(self._storage) // self._ranks_here
        if size + _SPARE > available // (2 if is_auto else 1):  # the system would kill a process, and raise no error
            share = "half of the" if is_auto else "the"
            return f"off: a copy of {megabytes} does not fit into {share} {available / 1e6:,.0f} MB of memory left"
        if not hasattr(os, "memfd_create"):
            return "off: this system has no memfd_create"
        try:
            self._block = Block(size + _SPARE)
        except OSError as error:  # the save behind which this is made is committed: it must not fail the run
            return f"off: {megabytes} of memory cannot be had: {error.strerror}"
        return f"memory: {megabytes} for a copy, which is written in the background"

    def close(self) -> None:
        """Give the memory back."""
        block, self._block, self._current = self._block, None, None
        if block is not None:
            block.close()


_OURS = "resume_adapters"


def own_methods(owner: Any, names: Iterable[str], packages: Iterable[str]) -> list[str]:
    """Return the methods of an object that neither some packages nor this one have defined, as ``Class.method``.

    Args:
        owner: the object; its class may have replaced a method, or an attribute of the object.
        names: the methods, of those that the object has.
        packages: whose methods are not returned.
    """
    known = {*packages, _OURS}
    candidates = {name: (getattr(type(owner), name, None), getattr(owner, "__dict__", {}).get(name)) for name in names}
    return [
        f"{type(owner).__name__}.{name}"
        for name, methods in candidates.items()
        if any(callable(each) and _package(each) not in known for each in methods)
    ]


def _package(method: Callable[..., Any]) -> str:
    """Return the package whose code a method is; ``functools.wraps`` says that it is the wrapped one's."""
    function = getattr(method, "__func__", method)
    module = getattr(function, "__globals__", {}).get("__name__", type(function).__module__)
    return str(module).partition(".")[0]

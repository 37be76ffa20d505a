"""Which way a save leaves the training thread, and what becomes of one that leaves through memory.

The first save of a launch is written as ever: only then is its size known, and what a save needs is made behind it. In
the next two, and in each sixteenth, everything is copied before the save returns, or digested where it goes straight to
the disk. What then changes before the next optimizer step is changed by something else than an optimizer, and is copied
at once in all saves that follow.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from resume_adapters.core.choices import Stage
from resume_adapters.core.log import logger
from resume_adapters.core.patching import wrapped
from resume_adapters.core.staging.arena import Arena
from resume_adapters.core.staging.capture import Capture, CapturedFile
from resume_adapters.core.staging.fence import Copies, Fence
from resume_adapters.core.staging.memory import available_memory
from resume_adapters.core.staging.owned import OwnedStorage, address_of, owned_storages
from resume_adapters.core.staging.selftest import is_exact
from resume_adapters.core.staging.writer import Writer
from resume_adapters.core.storage import fill
from resume_adapters.core.storage.base import Storage
from resume_adapters.errors import UnsupportedSetting

_WORTH_IT = 16 << 20
"""Bytes of a save from which on ``"auto"`` copies it: a smaller one takes some milliseconds in any case."""

_SPARE = 1 << 20
"""Bytes by which the memory is larger than the files: for the gaps between tensors."""

_BESIDE = 32 << 20
"""Bytes for what has to be copied where the rest goes straight to the disk."""

_WHOLE, _EVERY = 2, 16
"""Saves of a launch that are copied at once at first, and which of those that follow."""

_STARTS = 2
"""How often the process that writes is started."""


@dataclass(frozen=True)
class StagingOptions:
    """What an adapter knows of the saves of its framework.

    Attributes:
        stage: what the user wants.
        objection: returns why ``"auto"`` is ``"off"`` for this training; empty: nothing speaks against it.
        optimizers: returns the optimizers that change what is saved; what others change is copied at once.
        followers: returns further tensors, by names, that change only when the first of the optimizers has begun its
            step.
        tensors: returns tensors that are saved, by names that a user knows.
        writers: functions that are safetensors' ``save_file`` under names of the framework: module and name.

    Raises:
        UnsupportedSetting: ``stage`` is not one of its words.
    """

    stage: Stage = "off"
    objection: Callable[[], str] = str
    optimizers: Callable[[], Iterable[Any]] = tuple
    followers: Callable[[], Mapping[str, Any]] = dict
    tensors: Callable[[], Mapping[str, Any]] = dict
    writers: Sequence[tuple[Any, str]] = ()

    def __post_init__(self) -> None:
        if self.stage not in get_args(Stage):
            raise UnsupportedSetting(f'stage={self.stage!r} is invalid: expected "auto", "memory", "disk" or "off"')


class StagedSave:
    """A save that is captured, on its way to the disk. Its methods are for the thread that commits.

    Args:
        capture: what was captured.
        writer: fills the files.

    Attributes:
        copies: what may not change yet.
    """

    def __init__(self, capture: Capture, writer: Writer) -> None:
        self._capture = capture
        self._writer = writer
        straight = [each for file in capture.files for each in file.straight.values()]
        self.copies = Copies(each.address for each in (*(owned for _, owned in capture.later), *straight))

    def copy(self) -> list[OwnedStorage]:
        """Copy what was left for later, or write it; return what has changed meanwhile: the save is of no use then.

        Raises:
            OSError: a file could not be written.
            ValueError: one is not what ``torch.save`` writes.
        """
        arena = self._capture.arena
        changed = []
        try:
            for offset, each in self._capture.later:
                if each.is_in_place:
                    arena.copy(offset, each.address, each.bytes)
                if not each.is_as_sampled(arena.address(offset)):
                    changed.append(each)
                self.copies.done(each.address)
            self._capture.later.clear()
            for file in self._capture.files:
                changed += self._write(file)
        finally:
            self.copies.end()
        return changed

    def _write(self, file: CapturedFile) -> list[OwnedStorage]:
        """Write what goes straight to a file, and return what has changed meanwhile."""
        owned = list(file.straight.values())
        moved = [each for each in owned if not each.is_in_place]
        if not owned or moved:
            return moved
        memory = self._capture.arena.memory
        contents = {each.place: memory[each.begin or 0 :][: each.bytes] for each in file.pieces}
        fill.fill_holes(file.descriptor, {**contents, **{place: each.content for place, each in file.straight.items()}})
        return [each for each in owned if not each.is_as_sampled()]

    def fill(self) -> dict[Path, tuple[int, str]]:
        """Fill the files, and return the size and the digest of each that has its name still, by its path.

        Raises:
            OSError: one could not be written.
            ValueError: one is not what ``torch.save`` writes.
        """
        filled = [(each.path, self._writer.fill(each.descriptor, each.missing)) for each in self._capture.files]
        return {path: found for path, found in filled if path is not None}

    def read(self, path: Path) -> Iterator[memoryview] | None:
        """Return the content of a file that :meth:`fill` has filled; ``None`` for a file that was not captured.

        Args:
            path: the file, relative to the checkpoint.
        """
        for each in self._capture.files:
            if each.path == path:
                return fill.read_filled(each.descriptor, each.pieces, self._capture.arena.memory)
        return None

    def close(self) -> None:
        """Let go of files and tensors, written or not."""
        self.copies.end()
        self._capture.close()


class Staging:
    """Captures the saves of one start of a run.

    Args:
        options: what the adapter knows.
        storage: reads what the system says of its memory.
        ranks_here: processes of the run on this machine, which share its memory.
        waited: is called with the seconds that the training has waited for a copy.
        say: is called with each decision, in words.

    Attributes:
        decision: which way saves go, and why; empty until that is known.
    """

    def __init__(
        self,
        options: StagingOptions,
        storage: Storage,
        ranks_here: int,
        waited: Callable[[float], object],
        say: Callable[[str], object],
    ) -> None:
        self.decision = ""
        self._options = options
        self._storage = storage
        self._ranks_here = ranks_here
        self._fence = Fence(waited)
        self._say = say
        self._arena: Arena | None = None
        self._writer: Writer | None = None
        self._size = 0
        self._goes_straight = False
        self._starts = 0
        self._saves = 0
        self._lacking = 0
        self._has_captured = True
        self._restless: set[str] = set()
        self._has_dropped = False
        self._captured: Capture | None = None
        if self.is_wanted:
            self._fence.install()

    @property
    def is_wanted(self) -> bool:
        """Whether a save may be staged: alike on all ranks."""
        return self._options.stage != "off"

    # ---- On the training thread

    @contextlib.contextmanager
    def capturing(self, directory: Path) -> Iterator[bool]:
        """Return the context in which a framework writes a checkpoint; it says whether that is captured.

        Args:
            directory: where: a directory, or one file.
        """
        self._fence.wait()
        arena, has_dropped = self._arena, self._has_dropped
        self._has_dropped = False
        # A hole takes no room, and a disk that is full is found by a save that is waited for.
        if arena is None or has_dropped or self._storage.free_bytes(directory.parent) < self._size:
            yield False
            return
        import safetensors.torch
        import torch

        arena.clear()
        options, straight = self._options, self._goes_straight
        wholly = self._saves < _WHOLE or self._saves % _EVERY == 0
        may_wait = straight or not wholly
        owned = owned_storages(options.optimizers(), options.followers(), self._restless, may_wait=may_wait)
        capture = self._captured = Capture(directory, arena, owned, straight, wholly)
        with contextlib.ExitStack() as stack:
            stack.enter_context(wrapped(torch, "save", capture.torch_save))
            for module, name in ((safetensors.torch, "save_file"), *self._options.writers):
                stack.enter_context(wrapped(module, name, capture.save_file))
            yield True
            capture.end()

    def copy_of(self, tensor: Any) -> Any:
        """Return the tensor into which a tensor is copied that was captured since :meth:`take`; ``None``: it is not."""
        return None if self._captured is None else self._captured.copy_of(tensor)

    def take(self) -> StagedSave | None:
        """Return what was captured since the last call, and keep it as it is until it is copied; ``None``: nothing."""
        capture, self._captured = self._captured, None
        if capture is None or self._writer is None:
            return None
        self._lacking = capture.lacking
        self._has_captured = bool(capture.files)
        self._saves += 1
        staged = StagedSave(capture, self._writer)
        watched = [(offset, each) for offset, each in capture.now if each.name not in self._restless]
        if capture.later or watched or any(each.straight for each in capture.files):
            self._fence.arm(staged.copies, functools.partial(self._compare, capture.arena, watched))
        return staged

    def discard(self) -> None:
        """Let go of what was captured for a save that has failed."""
        capture, self._captured = self._captured, None
        if capture is not None:
            capture.close()

    def _compare(self, arena: Arena, copies: list[tuple[int, OwnedStorage]]) -> None:
        """Find out what has changed since it was copied, though no optimizer has made a step."""
        for offset, each in copies:
            if not each.is_whole or not arena.holds(offset, each.address, each.bytes):
                self._restless.add(each.name)

    # ---- On the thread that commits

    def names(self, changed: Sequence[OwnedStorage]) -> list[str]:
        """Return what has changed, by names that a user knows."""
        if not changed:
            return []
        try:
            tensors = self._options.tensors().items()
        except RuntimeError:  # the training changes its modules at this moment
            tensors = {}.items()
        known = {address_of(each): name for name, each in tensors}
        return [known.get(each.address, each.name) for each in changed]

    def drop(self, changed: Iterable[OwnedStorage]) -> None:
        """Write the next save at once, and copy what has changed at once from then on. All ranks drop a save together.

        Args:
            changed: what has changed on this rank; it may be nothing.
        """
        self._has_dropped = True
        self._restless.update(each.name for each in changed)

    def prepare(self, size: int) -> None:
        """Make what the next save needs, once the size of one is known.

        Args:
            size: bytes of the framework's files that this rank wrote.
        """
        if not self.is_wanted:
            return
        self._size = size
        decision = self._next_decision(size)
        if decision != self.decision:
            self.decision = decision
            self._say(decision)

    def _next_decision(self, size: int) -> str:
        arena, writer = self._arena, self._writer
        # Of the last save that was captured, once: those that follow may not be.
        lacking, self._lacking = self._lacking, 0
        has_captured, self._has_captured = self._has_captured, True
        if not self.decision:
            return self._decide(size)
        if arena is None or writer is None:
            return self.decision
        if lacking and not self._goes_straight:
            self._release()
            return self._decide(arena.size + lacking)
        if lacking and not has_captured:
            self._release()
            return f"off: {_megabytes(lacking)} change elsewhere than in an optimizer's step: too much to be copied"
        if not has_captured:
            self._release()
            return "off: nothing that is saved goes through torch.save or safetensors"
        if not writer.is_alive and self._starts < _STARTS:
            self._restart_writer(arena, writer)
        return self.decision

    def _decide(self, size: int) -> str:
        """Return which way saves go from now on, and why."""
        megabytes, is_auto = _megabytes(size), self._options.stage == "auto"
        if is_auto and (objection := self._options.objection()):
            return f"off: {objection}"
        if is_auto and size < _WORTH_IT:
            return f"off: {megabytes} are written about as fast as they are copied"
        # What a copy before this one had is not counted: it may still have to be compared.
        available = available_memory(self._storage) // self._ranks_here
        # Of more, the system would kill a process, and raise no error.
        fits = size + _SPARE <= available // (2 if is_auto else 1)
        if self._options.stage == "memory" and not fits:
            return f"off: {megabytes} are more than the {available / 1e6:,.0f} MB of memory that are left"
        if not hasattr(os, "memfd_create"):
            return "off: this system has no memory that processes share by a descriptor"
        try:
            is_native = is_exact()
        except OSError as error:  # the save behind which this is made is committed: it must not fail the run
            return f"off: memory that processes share by a descriptor cannot be had: {error.strerror}"
        if not is_native:
            return "off: files written with the torch or the safetensors installed here differ from the captured ones"
        self._goes_straight = self._options.stage == "disk" or not fits
        return self._make(size + _SPARE)

    def _make(self, size: int) -> str:
        megabytes = _megabytes(size)
        self._release()
        try:
            self._arena = Arena(_BESIDE if self._goes_straight else size)
            self._writer = self._start_writer(self._arena)
        except OSError as error:
            self._release()
            return f"off: {megabytes} of memory, and a process that writes, cannot be had: {error.strerror}"
        if self._goes_straight:
            return f"disk: the system gets {megabytes} after the save, and the next optimizer step waits for that"
        return f"memory: {megabytes} for a copy, which is written in the background"

    def _start_writer(self, arena: Arena) -> Writer:
        self._starts += 1
        return Writer(arena)

    def _restart_writer(self, arena: Arena, dead: Writer) -> None:
        try:
            self._writer = self._start_writer(arena)
        except OSError as error:
            logger.warning("The process that writes checkpoints cannot be started again: %s.", error)
        else:
            dead.close()

    # ---- The end

    def _release(self) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._arena is not None:
            self._arena.close()
        self._arena = self._writer = None

    def close(self) -> None:
        """Let the state change, and give memory and process back."""
        self._fence.disarm()
        self._release()


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.{0 if size >= 1e7 else 1}f} MB"

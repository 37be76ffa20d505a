"""What ``doctor`` checks: the disk, the clocks, the time that a stop has, what repeats itself, versions, and a save.

Each check takes what the core or the system says, and judges it: green, yellow (look at it) or red (a run could not
save, or would not come back).
"""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import itertools
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import psutil

from resume_adapters.cli.render import size
from resume_adapters.core import devices
from resume_adapters.core.checkpoint.layout import CONTROL
from resume_adapters.core.checkpoint.manifest import Manifest
from resume_adapters.core.checkpoint.remove import REMOVED
from resume_adapters.core.requirements import is_older
from resume_adapters.core.run_directory.status import job_number
from resume_adapters.core.stop.walltime import ShutdownMargin, find_deadline, slurm_time_left
from resume_adapters.core.storage.base import Storage
from resume_adapters.errors import UnsupportedSetting

Level = Literal["green", "yellow", "red"]


class Finding(msgspec.Struct, frozen=True):
    """What a check found, what it expected, and what to do where that is not so."""

    check: str
    level: Level
    found: str
    expected: str = ""
    next: str = ""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the saves of a run.

    Attributes:
        manifest: of the newest one.
        seconds: from the beginning of the slowest save to its commit.
        step_seconds: what a step takes; 0 where that is unknown.
        kept: how many checkpoints stay beside a new one; ``None`` if that is unknown.
        to_come: how many saves the run has still to do; 0 if that is unknown.
    """

    manifest: Manifest
    seconds: float = 0.0
    step_seconds: float = 0.0
    kept: int | None = None
    to_come: int = 0

    @property
    def room_for(self) -> int:
        """How many further checkpoints there should be room for: a new one is written before an old one goes."""
        return max(2, self.to_come if self.kept is None else self.kept + 1)

    @property
    def names(self) -> int:
        """How many files and directories a checkpoint takes, with its manifest."""
        paths = [Path(each.path) for each in self.manifest.files]
        return len({Path("resume/manifest.json"), *paths}.union(*(each.parents for each in paths)))


def nearest(directory: Path) -> Path:
    """Return a directory, or the nearest one above it that is there."""
    return next(each for each in (directory, *directory.parents) if each.is_dir())


@contextlib.contextmanager
def scratch(run_directory: Path) -> Iterator[Path]:
    """Make a directory on the disk of a run directory, within this context.

    What a kill leaves in a run directory is removed by its next start.
    """
    there = nearest(run_directory)
    is_run = (there / CONTROL).is_dir()
    prefix, above = (f"{REMOVED}doctor-", there / CONTROL) if is_run else (".resume-adapters-doctor-", there)
    made = tempfile.mkdtemp(prefix=prefix, dir=above)
    try:
        yield Path(made)
    finally:
        shutil.rmtree(made, ignore_errors=True)


# ---- The disk

_UNSUITED = {
    r"tmpfs|ramfs": ("memory, lost with the machine", "mount a disk, or add a mirror (docs/mirrors.md)"),
    r"overlay|aufs": ("lost with the container", "mount a disk, or add a mirror (docs/mirrors.md)"),
    r"fuse\.(s3fs|gcsfuse|goofys|rclone|blobfuse2?|mount-s3)": (
        "an object store, whose renames are copies",
        "train on a disk, with mirror=[Remote(URL)]",
    ),
}
_PROBE = 8 << 20
"""Bytes that are forced onto the disk to see whether that takes time."""
_MEMORY = 30e9
"""Bytes a second that no disk can write."""
_SKEW = 2.0
"""Seconds by which clocks may differ: some file systems keep no finer times."""
_OF_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO)


def disk(storage: Storage, directory: Path) -> Iterator[Finding]:
    """Yield what is found by writing into a directory, which is empty."""
    yield _file_system(directory.resolve())
    try:
        yield _renames(storage, directory)
        yield _fsync(storage, directory)
        yield _clock(storage, directory)
    except OSError as error:
        yield unwritable(error)


def unwritable(error: OSError) -> Finding:
    """Return what it means that nothing could be written."""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    wanted = "room for a checkpoint" if is_full else "a directory that this user can write"
    then = "free space or inodes, or raise the quota" if is_full else "fix its permissions, or take another directory"
    return Finding("disk", "red", f"cannot be written: {error.strerror or error}", wanted, then)


def _file_system(directory: Path) -> Finding:
    mounts = [each for each in psutil.disk_partitions(all=True) if directory.is_relative_to(each.mountpoint)]
    mount = max(reversed(mounts), key=lambda each: len(each.mountpoint))
    for kind, (why, then) in _UNSUITED.items():
        if re.fullmatch(kind, mount.fstype):
            return Finding("file system", "yellow", f"{mount.fstype}: {why}", "a disk that outlives the job", then)
    is_soft = "soft" in mount.opts.split(",")
    found = f"{mount.fstype}{', mounted soft: a slow server fails a save' if is_soft else ''}"
    return Finding("file system", "yellow" if is_soft else "green", found, "mounted hard", "mount it with -o hard")


def _renames(storage: Storage, directory: Path) -> Finding:
    found = "a rename replaces files and links, and moves directories that are open"
    try:
        failed = next((what for what, is_done in _rename(storage, directory) if not is_done), "")
        level: Level = "red" if failed else "green"
        found = f"a rename does not {failed}" if failed else found
    except OSError as error:
        if error.errno in _OF_WRITING:
            raise
        level, found = "red", f"a rename fails: {error.strerror or error}"
    wanted, then = "that it replaces, as each commit needs it", "take another file system for the run directory"
    return Finding("rename", level, found, wanted, then)


def _rename(storage: Storage, directory: Path) -> Iterator[tuple[str, bool]]:
    """Rename as a commit does; yield each time what should have happened, and whether it has."""
    old, new, begun, named = (directory / name for name in ("old", "new", "begun", "named"))
    storage.write(old, b"old")
    storage.write(new, b"new")
    storage.replace(new, old)
    yield "replace a file", storage.read(old) == b"new" and not storage.exists(new)
    storage.make_directory(begun)
    storage.hold(begun)
    try:
        storage.replace(begun, named)
        storage.write(begun / "file", b"new")
    finally:
        storage.release(begun)
    yield "move a directory that is open", storage.exists(named / "file")
    if storage.symlink("named", new):
        storage.replace(new, old)
        yield "replace by a link", storage.is_link(old)


def _fsync(storage: Storage, directory: Path) -> Finding:
    file, probe = directory / "large", min(_PROBE, max(1, storage.free_bytes(directory) // 4))
    seconds = []
    for _ in range(3):  # the least of them: others use the machine too
        storage.write(file, os.urandom(probe))
        began = time.perf_counter()
        storage.sync(file)
        seconds.append(time.perf_counter() - began)
    storage.sync(directory)
    storage.remove_file(file)
    level: Level = "yellow" if min(seconds) < probe / _MEMORY else "green"
    found = f"of {size(probe)} took {1000 * min(seconds):.3g} ms"
    then = "a loss of power may damage a committed checkpoint: add a mirror, or take another disk"
    if "eatmydata" in os.environ.get("LD_PRELOAD", ""):
        level, found, then = "red", "LD_PRELOAD has eatmydata, which skips it", "start without that"
    return Finding("fsync", level, found, "that it waits for the disk", then)


def _clock(storage: Storage, directory: Path) -> Finding:
    before = time.time()
    storage.write(directory / "now", b"")
    stamp, after = storage.stamp(directory / "now"), time.time()
    written = after if stamp is None else stamp.changed / 1e9
    return _skew("clocks of the disk and here", max(before - written, written - after))


def clocks_of_run(times: Iterable[float], now: float) -> Finding:
    """Compare the times that the launches of a run have written, in their order, with each other and with now."""
    behind = [before - after for before, after in itertools.pairwise([*times, now])]
    return _skew("clocks of the launches and here", max(behind, default=0.0))


def _skew(check: str, seconds: float) -> Finding:
    if seconds <= _SKEW:
        return Finding(check, "green", f"they agree to {_SKEW:.0f} s")
    then = "synchronise them (chrony, ntpd): a walltime and KeepWithin go by them"
    return Finding(check, "yellow", f"they differ by {seconds:.0f} s", f"at most {_SKEW:.0f} s", then)


def room(directory: Path, save: Measured | None) -> Iterator[Finding]:
    """Yield whether the checkpoints of a run have room on the disk of a directory, in bytes and in names."""
    found, count = os.statvfs(directory), save.room_for if save else 1
    kinds = [("space", found.f_bavail * found.f_frsize, save.manifest.bytes if save else 1, size)]
    if found.f_files:  # some file systems make inodes as they need them
        kinds.append(("inodes", found.f_favail, save.names if save else 1, "{:,}".format))
    for name, free, takes, words in kinds:
        level: Level = "red" if free < takes else "yellow" if free < count * takes else "green"
        has = f"{words(free)} free{f', and a checkpoint takes {words(takes)}' if save else ''}"
        wanted = f"room for {count} more ({words(count * takes)})"
        yield Finding(name, level, has, wanted, "free some, or keep fewer checkpoints, such as KeepLast(2)")


# ---- The scheduler, determinism, versions


def scheduler(environment: Mapping[str, str], save: Measured | None, grace: float, now: float) -> Iterator[Finding]:
    """Yield whether a stop has time for a save, and whether a launch knows when its time ends.

    Args:
        environment: the environment variables.
        save: what a save and a step take; ``None`` if that is unknown.
        grace: seconds that the scheduler leaves between SIGTERM and SIGKILL.
        now: seconds since 1970.
    """
    level: Level = "green"
    margin, least, took = ShutdownMargin("auto"), 0.0, "no save is measured"
    if save is not None and save.seconds:
        margin.polled(0.0)
        margin.polled(save.step_seconds)
        margin.saved(save.seconds)
        least = save.seconds + save.step_seconds
        level = "red" if grace < least else "yellow" if grace < margin.reserve else "green"
        took = f"a step and a save take {least:.3g} s"
    needed = f"{margin.reserve:.0f} s"
    then = f"give it {needed} (Slurm GraceTime or --signal, terminationGracePeriodSeconds), and say so with --grace"
    yield Finding("grace", level, f"{grace:.0f} s after SIGTERM; {took}", needed, then)
    try:
        ends = find_deadline(None, environment, now=now, began=now, ask=slurm_time_left)
    except UnsupportedSetting as error:
        yield Finding("walltime", "red", error.message, "one that a launch accepts", "correct it")
        return
    if ends is not None:
        level, found = "green" if ends.at - now > margin.reserve else "yellow", f"over in {ends.at - now:.0f} s"
        yield Finding("walltime", level, f"{found} ({ends.source})", f"more than {needed}", "ask for a longer one")
    else:
        then = "if it has an end, set RESUME_ADAPTERS_MAX_RUNTIME or StopOn(walltime=...)"
        job = job_number()
        found = f"job {job} does not say when it ends" if job else "no scheduler's job"
        yield Finding("walltime", "yellow" if job else "green", found, "a time", then)


def determinism(environment: Mapping[str, str], start: Mapping[str, Any] | None) -> Iterator[Finding]:
    """Yield whether two launches do the same.

    Args:
        environment: of the command.
        start: what a launch of the command has traced at its start; ``None`` without one.
    """
    seed = environment.get("PYTHONHASHSEED", "random")
    then = "`resume-adapters run` sets it to 0; else the sets of each launch have an order of their own"
    yield Finding("PYTHONHASHSEED", "yellow" if seed == "random" else "green", seed, "a number", then)
    kind = devices.kind() if start is None else start.get("device")
    lacking = ["torch.use_deterministic_algorithms(True)"] if start is not None and not start["repeats"] else []
    if kind == "cuda" and "CUBLAS_WORKSPACE_CONFIG" not in environment:
        lacking.append("CUBLAS_WORKSPACE_CONFIG=:4096:8")
    level: Level = "yellow" if kind and lacking else "green"
    found = ", without ".join([kind or "cpu", *(lacking if kind else ())])
    wanted = "kernels that repeat their results; without them a resume is the same up to the last digits"
    yield Finding("kernels", level, found, wanted, "docs/accelerators.md says what each costs")


def versions(requirements: Iterable[str]) -> Iterator[Finding]:
    """Yield what is installed outside the versions that this package and its extras require."""
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    wanted = {name: SpecifierSet() for name in ("torch", "transformers", "lightning", "accelerate", "deepspeed")}
    for each in map(Requirement, requirements):
        if each.name in wanted:
            wanted[each.name] &= each.specifier
    for name, tested in wanted.items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found = importlib.metadata.version(name)
            is_old = any(each.operator == ">=" and is_older(found, each.version) for each in tested)
            level: Level = "green" if tested.contains(found, prereleases=True) else "red" if is_old else "yellow"
            yield Finding(name, level, found, f"{tested}, which is tested", f"pip install '{name}{tested}'")


def captured(save: Measured | None) -> Iterator[Finding]:
    """Yield what a save holds of the state, and what not."""
    if save is None:
        then = "give the command after --: it is run until its first save"
        yield Finding("state", "yellow", "there is no save to look at", "one", then)
        return
    manifest = save.manifest
    missing = [each for each in manifest.parts if each.by == "missing"]
    for each in missing:
        then = "do what it says, or accept what it costs"
        yield Finding("state", "yellow", f"{each.name} MISSING: {each.note}", "that it is captured", then)
    held = ", ".join(each.name for each in manifest.parts if each not in missing)
    took = f"step {manifest.step}, {size(manifest.bytes)} in {save.seconds:.3g} s"
    yield Finding("state", "green", f"{took}: {held or 'no part of the state'}")

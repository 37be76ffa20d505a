"""What the ranks of the core's tests do: real processes over gloo, forked by ``launch.Server``."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import sys
import time
import types
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from resume_adapters import KeepLast, Memory, Remote
from resume_adapters.core.ranks import current_ranks
from resume_adapters.core.recovery.attempt import Attempt, RunningAttempt, under_way
from resume_adapters.core.recovery.plan import HeldCheckpoint, Level
from resume_adapters.core.recovery.updates import UpdateWatch
from resume_adapters.core.run import monitor
from resume_adapters.core.run_directory.control import ControlDirectory
from resume_adapters.core.run_directory.status import RunState
from resume_adapters.core.saving.cadence import Cadence
from resume_adapters.core.stop import vote
from resume_adapters.core.stop.policy import StopOn
from resume_adapters.core.stop.signals import StopFlag
from resume_adapters.core.stop.vote import StopVote
from resume_adapters.core.tiers import mirrors
from resume_adapters.core.tiers.remote import RemoteTier
from resume_adapters.errors import MissingFramework, ResumeError, SaveFailed, Stopped
from waiting import until

import faults
from faults import Disturbed, refuse
from miniature import Miniature, MiniatureContent, effects, left_behind
from plain_torch import Killed, Launch, killed_after

LAST = 8


def agree(rank: int, asked: str) -> dict[str, Any]:
    """Run steps; this rank is sent SIGTERM during the step that ``asked`` names for it."""
    mine = json.loads(asked)[rank]
    flag = StopFlag(StopOn())
    flag.install()
    agreement = StopVote(current_ranks(), flag)
    stopped = None
    for step in range(LAST):
        if step == mine:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.06)  # of shorter steps only some are voted on
        if agreement.poll():
            stopped = step
            break
    still = stopped is not None and agreement.poll() and agreement.poll()
    agreement.close()
    return {"stopped": stopped, "reason": flag.reason, "still": still}


def hurry(rank: int) -> dict[str, Any]:
    """Take steps of a few milliseconds, on one rank of varied length; rank one is asked to stop after step 300.

    How long they are is set here, for on a loaded machine they are as long as ranks vote on each of.
    """
    now = 0.0
    vote.time = types.SimpleNamespace(monotonic=lambda: now)  # type: ignore[assignment]
    flag = StopFlag(StopOn())
    agreement = StopVote(current_ranks(), flag)
    votes, step, native = 0, 0, agreement._vote

    def counted() -> None:
        nonlocal votes
        votes += 1
        native()

    agreement._vote = counted  # type: ignore[method-assign]
    while not agreement.poll():
        step += 1
        dist.barrier()
        seconds = 0.001 + 0.002 * (step % 7 if rank else 1)
        now += seconds
        time.sleep(seconds / 4)
        if step == 300 and rank:
            flag.request("SIGTERM")
    agreement.close()
    return {"stopped": step, "votes": votes}


def skip(rank: int, directory: str, asked: str) -> dict[str, Any]:
    """Read through data, one rank slowly; the other is sent SIGTERM on the way."""
    job = Miniature(Path(directory), ranks=current_ranks())
    job.run.begin(job.step, 0.0)
    skipped = 0
    try:
        while skipped < 2000:
            skipped += 1
            if rank == int(asked) and skipped == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            job.run.skip_batch()
            time.sleep(0.1)
        job.run.end_skipping()
    except Stopped as left:
        return {"left": left.reason, "skipped": skipped}
    return {"left": None, "skipped": skipped}


def clock(rank: int, directory: str, saved: str) -> dict[str, Any]:
    """Take steps with a cadence of time that rank zero's clock alone reaches, after step 10."""
    cadence = Cadence(timedelta(hours=1))
    job = Miniature(Path(directory), ranks=current_ranks(), cadence=cadence)
    job.run.begin(0, 0.0)
    saves = []
    for step in range(1, 21):
        time.sleep(0.06)
        if step == 10 and rank == 0:
            cadence.start(time.monotonic() - 3600)
        if job.run.steps.end_step(step, 0.0).save:
            job.commit(step)
            saves.append(step)
        if step == 10 and json.loads(saved):
            job.commit(step)
    job.run.close()
    return {"saves": saves}


def run_short(rank: int, directory: str, own: str) -> dict[str, Any]:
    """Come to the first batch after the walltime, of which only rank zero knows."""
    shares = not json.loads(own)
    job = Miniature(
        Path(directory, "" if shares else str(rank)),
        ranks=current_ranks(),
        stop=StopOn(walltime=0.01 if rank == 0 else None),
        is_node_local=json.loads(own) == "local",
    )
    monitor._PERIOD = 0.1
    job.run.begin(job.step, 0.0)
    if rank == 0:
        until(lambda: job.run.flag.reason)
    try:
        job.run.end_skipping()
    except Stopped as left:
        return {"left": type(left).__name__, "reason": left.reason}
    return {"left": None}


def save(rank: int, directory: str, *steps: str) -> dict[str, Any]:
    """Save and commit some steps."""
    job = Miniature(Path(directory), ranks=current_ranks())
    for step in steps:
        job.commit(int(step))
    job.run.close()
    return {"resumed": job.step, "committed": job.committed()}


def resume(rank: int, *directories: str) -> dict[str, Any]:
    """Resume, each rank from its own view of the run directory, and commit one more step."""
    job = Miniature(Path(directories[rank]), ranks=current_ranks())
    found = {"resumed": job.step, "text": job.text, "rejected": [each.reason for each in job.choice.rejected]}
    job.commit(job.step + 10)
    job.run.close()
    return found


def start_from(rank: int, directory: str, *named: str) -> dict[str, Any]:
    """Start a run that has no checkpoint of its own from the one that each rank names."""
    return {"resumed": Miniature(Path(directory), ranks=current_ranks(), resume=named[rank]).step}


def go_on_from_memory(rank: int, directory: str) -> dict[str, Any]:
    """Go on, within a block, from what memory holds of a start that is not the last one."""
    job = Miniature(Path(directory), ranks=current_ranks())
    job.commit(1)
    job.run.close()
    memory = {Path(directory): HeldCheckpoint(f"{directory}/checkpoint-1", job.run.generation - 1)}
    calls = {"announce": lambda: True, "cut": lambda: None, "forget": lambda: None}
    with under_way(RunningAttempt(Attempt(1, Level.MEMORY), memory, UpdateWatch(), **calls, began=0.0)):
        job = Miniature(Path(directory), ranks=current_ranks())
    found = {"step": job.step, "from_memory": job.run.attempt_checkpoint is not None}
    job.run.close()
    return found


def fail(rank: int, directory: str, where: str, failing: str) -> dict[str, Any]:
    """Save while one rank's disk or adapter fails at some point; then save again, all ranks together."""
    storage = Failing()
    job = Miniature(Path(directory), ranks=current_ranks(), storage=storage)
    job.commit(10)
    facts = None
    if rank == int(failing):
        storage.where = where
        facts = _broken if where == "facts" else None
    heard = ""
    try:
        job.save(20, describe=facts)
        job.run.saver.flush()
    except ResumeError as error:
        heard = f"{type(error).__name__}: {error}"
    storage.where = ""
    then = job.committed()
    dist.barrier()
    job.commit(30)
    job.run.close()
    return {"heard": [heard], "then": then, "at_last": job.committed(), "rank": rank}


def go_on(rank: int, directory: str, where: str) -> dict[str, Any]:
    """Save twice with ``on_save_error="continue"``, while rank one's disk fails; then the disk works again."""
    storage = Failing()
    job = Miniature(Path(directory), ranks=current_ranks(), storage=storage, on_save_error="continue")
    job.commit(10)
    saved = []
    for step in (20, 30):
        storage.where = where if rank == 1 and step == 20 else ""
        saved.append(
            job.run.saver.save(f"checkpoint-{step}", step, MiniatureContent(job.run, "text", step, None, None))
        )
        job.run.saver.drain()
    job.run.close()
    return {"saved": saved, "committed": job.committed()}


def _broken() -> dict[str, Any]:
    raise ZeroDivisionError("the adapter is broken")


class Failing(Disturbed):
    """A disk that is full for one kind of work: writing parts, forcing files onto the disk, or the journal."""

    def __init__(self) -> None:
        super().__init__(self._look)
        self.where = ""

    def _look(self, operation: str, path: Path) -> None:
        is_of_commit = path.name == "model.bin" or path.name.startswith("rank-")
        where = {"write": "write", "sync": "commit" if is_of_commit else None, "append": "after"}.get(operation)
        if where is not None and where == self.where:
            refuse(errno.ENOSPC)


def train(rank: int, one: str, two: str) -> dict[str, Any]:
    """Go on with a run of one rank to its end; begin another, and go on with it after a kill, up to a second one."""
    whole = Launch(Path(one), data="elastic", batch=2)()
    taken: list[Any] = []
    for start in (0, 4):
        part = Launch(Path(two), killed_after(5), data="elastic", batch=2)
        with contextlib.suppress(Killed):
            part()
        taken[start:] = [line[2] for line in part.trace]
    weights = [parameter.tolist() for parameter in whole.framework.model.parameters()]
    return {"one": [line[2] for line in whole.trace], "two": taken, "weights": weights, "draws": whole.end[-1]}


def halt_last(rank: int, directory: str) -> dict[str, Any]:
    """Train to the end; rank one alone halts the run behind its last step."""

    def halt(launch: Launch) -> None:
        if rank == 1 and launch.loop.global_step == LAST:
            launch.loop.halt("look at the loss")

    launch = Launch(Path(directory), halt, data="elastic", batch=2, max_steps=LAST)
    try:
        launch()
    except Stopped as left:
        return {"left": type(left).__name__, "reason": left.reason}
    return {"left": None}


def reopen(rank: int, directory: str, own: str, times: str) -> dict[str, Any]:
    """Open a run, save one step and close it, many times; in one run directory, or each rank in its own.

    There each rank has the files of all, or with ``"local"`` those of its own. So it is in the jobs below.
    """
    options: dict[str, Any] = {"ranks": None, "keep": KeepLast(1), "is_node_local": json.loads(own) == "local"}

    def once(step: int) -> None:
        job = Miniature(Path(directory, str(rank) if json.loads(own) else ""), **options)
        job.run.begin(job.step, 0.0)
        job.commit(step)
        job.run.steps.end_step(step, 0.0)
        job.run.close()
        job.run.close()  # closing a closed run does nothing

    once(1)  # what the first makes once for the process stays
    before = effects()
    for step in range(2, int(times) + 2):
        once(step)
    return {"left": left_behind(before)}


def mirror(rank: int, directory: str, own: str, url: str, *damage: str) -> dict[str, Any]:
    """Train two steps with a mirror, end, lose one or all run directories, and start again.

    With ``damage`` a bit of what the one directory has is flipped instead.
    """
    options: dict[str, Any] = {
        "ranks": None,
        "mirror": [Remote(url, timeout=timedelta(seconds=300))],
        "is_node_local": json.loads(own) == "local",
    }
    here = Path(directory, str(rank) if json.loads(own) else "")
    job = Miniature(here, **options)
    job.run.begin(0, 0.0)
    for step in (1, 2):
        job.commit(step)
    job.run.finish_copies()
    states = [each.step for each in job.run.context.mirrors.states]
    job.run.close()
    dist.barrier()
    if rank == 1 and damage:
        faults.flip(next(here.glob("checkpoint-2/resume/*.safetensors")))
    elif rank == 1 or not json.loads(own):
        shutil.rmtree(here, ignore_errors=True)
    dist.barrier()
    job = Miniature(here, **options)
    found = {"step": job.step, "text": job.text, "mirrored": states, "generation": job.run.generation}
    job.run.close()
    return found


SHORT = 12.0
"""Seconds for which the ranks of :func:`copy_slowly` wait for each other, where it is half an hour else."""


def copy_slowly(rank: int, directory: str, own: str, url: str) -> dict[str, Any]:
    """As :func:`mirror`, where rank one takes longer for each copy than a group of the training waits for a rank."""
    distributed_c10d.default_pg_timeout = timedelta(seconds=SHORT)

    def slowly(work: Callable[..., Any]) -> Callable[..., Any]:
        due = [1.5 * SHORT]

        def delayed(*given: Any) -> Any:
            if rank == 1 and due:
                time.sleep(due.pop())
            return work(*given)

        return delayed

    RemoteTier.copy = slowly(RemoteTier.copy)  # type: ignore[method-assign]
    RemoteTier.read = slowly(RemoteTier.read)  # type: ignore[method-assign]
    return mirror(rank, directory, own, url)


def remember(rank: int, directory: str, own: str, nodes: str) -> dict[str, Any]:
    """Save to the memory of this rank's node, one step to the disk as well, and start again."""
    memory = Path(directory, f"memory-{rank % int(nodes)}")
    memory.mkdir(exist_ok=True)
    options: dict[str, Any] = {
        "ranks": None,
        "mirror": [Memory(directory=str(memory), save_every=timedelta(seconds=0.05))],
        "is_node_local": json.loads(own) == "local",
    }
    here = Path(directory, "run", str(rank) if json.loads(own) else "")
    job = Miniature(here, **options)
    job.run.begin(0, 0.0)
    job.commit(1)
    steps = []
    for step in range(2, 40):
        time.sleep(0.02)
        if job.run.steps.end_step(step, 0.0).save_to_memory:
            content = MiniatureContent(job.run, f"state at {step}", step, None, None)
            job.run.saver.save_to_memory(f"checkpoint-{step}", step, content)
            steps.append(step)
    job.run.close()
    dist.barrier()
    if here == Path(directory, "run") and memory.name == "memory-1":  # a node that is replaced: the other has it all
        shutil.rmtree(memory)
        memory.mkdir()
    job = Miniature(here, **options)
    found = {
        "step": job.step,
        "text": job.text,
        "in_memory": steps,
        "problem": job.run.context.memory.states[0].problem,
    }
    job.run.context.memory.failed(job.run.ranks, SaveFailed("the memory is full", errno=errno.ENOSPC))
    job.commit(100)
    job.run.finish_copies()
    job.run.close()
    return found | {"left": [str(each) for each in memory.glob("*/*")]}


def tidy(rank: int, directory: str, when: str) -> dict[str, Any]:
    """Use a memory that rank zero, which leads the node, cannot list at the begin of the run, or at its end."""
    memory = Path(directory, "memory")
    memory.mkdir(exist_ok=True)
    fails: list[str] = []

    def look(operation: str, path: Path) -> None:
        if rank == 0 and when in fails and operation == "entries" and path.is_relative_to(memory):
            refuse(errno.EIO, path)

    mirror = [Memory(directory=str(memory), save_every=1)]
    job = Miniature(Path(directory, "run"), ranks=None, storage=Disturbed(look), mirror=mirror)
    fails[:] = ["begin"]
    job.run.begin(0, 0.0)
    fails[:] = []
    job.commit(1)
    held = len([*memory.glob("*/*/checkpoint-1")])
    fails[:] = ["end"]
    job.run.finish_copies()
    (state,) = job.run._status(RunState.RUNNING).mirrors
    job.run.close()
    return {"held": held, "problem": state.problem, "step": job.run.last_commit}


def fence_memory(rank: int, directory: str) -> dict[str, Any]:
    """Save to memory where rank zero, which leads the node, learns that a later start owns the run directory."""
    memory = Path(directory, "memory")
    memory.mkdir(exist_ok=True)
    job = Miniature(Path(directory, "run"), ranks=None, mirror=[Memory(directory=str(memory), save_every=1)])
    job.run.begin(0, 0.0)
    for step in (1, 2, 3):
        job.commit(step)  # the first of them is removed before the fourth is written
    if rank == 0:
        ControlDirectory(job.run.storage, job.run.directory, time.time).fencing.take_over(job.run.generation)
    content = MiniatureContent(job.run, "state at 4", 4, None, None)
    error = ""
    try:
        job.run.saver.save_to_memory("checkpoint-4", 2, content)
        job.run.saver.flush()
    except ResumeError as found:
        error = type(found).__name__
    ended = job.run.ranks.gather(error)  # no rank waits in another collective
    with contextlib.suppress(ResumeError):
        job.run.close()
    return {"errors": ended}


def lack(rank: int, directory: str) -> dict[str, Any]:
    """Start with a mirror for which rank one lacks what it needs."""

    def missing(*_: object) -> None:
        raise MissingFramework("it needs obstore")

    if rank == 1:
        mirrors.ObjectStore = missing  # type: ignore[assignment, misc]
    try:
        Miniature(Path(directory, "run"), ranks=None, mirror=[Remote("memory://a"), Remote("memory://b")])
    except ResumeError as error:
        return {"error": type(error).__name__, "message": error.message}
    return {}


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    everything = (
        *(
            agree,
            hurry,
            skip,
            clock,
            run_short,
            save,
            resume,
            start_from,
            go_on_from_memory,
            fail,
            go_on,
            train,
            halt_last,
            reopen,
        ),
        *(
            mirror,
            copy_slowly,
            remember,
            tidy,
            fence_memory,
            lack,
        ),
    )
    work = {each.__name__: each for each in everything}[sys.argv[1]]
    try:
        result = work(rank, *sys.argv[2:])
    except ResumeError as error:
        result = {"error": type(error).__name__, "message": str(error)}
    Path(f"result.{rank}").write_text(json.dumps(result))
    dist.barrier()


main()

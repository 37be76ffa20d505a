"""Tests of laws that are the same for every adapter: its ``test_laws.py`` gives them names, and says what its job is.

It has a ``JOB``, and then ``test_killed_before_it = laws.of_each(laws.killed_before_it, OPERATIONS, "commits")``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from selection import often

import contract
from faults import DAMAGES

Test = Callable[..., None]


@dataclass(frozen=True)
class Job:
    """What the laws need to know of an adapter's job.

    Attributes:
        kill: kills it in the middle, more than a step behind a save.
        saves: lets it save at the steps 2, 4 and 6, and keep the newest alone.
        operations: those of such a job before which it is killed.
        leaving: the steps of which such a job may leave checkpoints.
        of_the_end: names of final facts that go with a process that is killed behind its last save.
        plain: the job itself.
        audited: the job on two ranks that DDP keeps alike, which saves at the steps 5 and 10.
        copied: the job, with saves that are copied.
        often: lets it save at each second step.
        ranks: on how many it finds a file in the place of its run directory.
        everything: the job, with a file of each kind in its checkpoints.
        newest: name of its checkpoint of step 15, behind which it is killed.
        before: name of that of step 10.
        damages: files of the newest, relative to the run directory, and what befalls each.
        foreign: the adapter's detector of checkpoints that the package did not write.
        load: loads the weights of one of its checkpoints by the bare framework.
    """

    kill: contract.Kill
    saves: contract.Config
    operations: Mapping[str, contract.Operation]
    leaving: Sequence[set[int]] = ({6}, {4, 6})
    of_the_end: Sequence[str] = ()
    plain: contract.Config = field(default_factory=dict)
    audited: contract.Config = field(default_factory=dict)
    copied: contract.Config = field(default_factory=dict)
    often: contract.Config = field(default_factory=dict)
    ranks: int = 1
    everything: contract.Config = field(default_factory=dict)
    newest: str = ""
    before: str = ""
    damages: Mapping[str, str] = field(default_factory=dict)
    foreign: Any = None
    load: Callable[[Path], Mapping[str, Any]] = dict


# ---- For the modules


def thorough(test: Test) -> Test:
    """Return a test as one that only the session ``thorough`` runs, for this module alone."""
    return pytest.mark.thorough(_copied(test))


def of_each(test: Test, cases: Iterable[str], *chosen: str) -> Test:
    """Return a test with a parameter ``case``; for those that are not chosen it is thorough."""
    return pytest.mark.parametrize("case", often(cases, *chosen))(_copied(test))


def _copied(test: Test) -> Test:
    @functools.wraps(test)
    def copied(*arguments: Any, **named: Any) -> None:
        test(*arguments, **named)

    return copied


# ---- The tests


def killed_before_it(case: str, job: Job, bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """Law 3: before each kind of operation of saving, committing and removing, by SIGKILL."""
    _killed_before(job.operations[case], job.saves, job, bench, reference, tmp_path)


def killed_before_it_with_copies(case: str, job: Job, bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """Law 3, where a thread writes what was copied."""
    _killed_before(job.operations[case], {**job.saves, **job.copied}, job, bench, reference, tmp_path)


def _killed_before(
    operation: contract.Operation, config: contract.Config, job: Job, bench: contract.Bench, reference: Any, place: Path
) -> None:
    contract.killed_before_an_operation(
        bench, place, config, reference(config), operation, leaving=job.leaving, of_the_end=job.of_the_end
    )


def killed_between_copy_and_commit(job: Job, bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    config = {**job.copied, **job.often}
    contract.between_copy_and_commit(bench, tmp_path, config, reference(config), job.kill["event"])


def killed_twice_with_copies_equals_never(
    case: str, job: Job, bench: contract.Bench, reference: Any, tmp_path: Path
) -> None:
    """Laws 1 and 2 on each device, which is the case."""
    config = {**job.copied, **job.often, **({} if case == "cpu" else {"device": case})}
    kills = [{**job.kill, "step": step} for step in (13, 17)]
    contract.interrupted_equals_uninterrupted(bench, tmp_path, config, reference(config), kills)


def an_epoch_begins_once_on_two_ranks(job: Job, bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """What hooks and the body of an epoch change before its batches was done when it was saved."""
    config = {**job.audited, **job.often, "begins": True}
    kills = [{**job.kill, "step": step} for step in (7, 15, 17)]
    contract.interrupted_equals_uninterrupted(bench, tmp_path, config, reference(config, ranks=2), kills, ranks=2)


def an_empty_machine_resumes_from_the_mirror(job: Job, bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    contract.an_empty_machine_resumes(bench, tmp_path, job.plain, reference(job.plain), job.kill)


def weights_alone_are_kept(job: Job, bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    contract.weights_alone_are_kept(bench, tmp_path, job.plain, reference, job.kill, job.load)


def a_kill_loses_no_step_that_memory_has(job: Job, bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    contract.a_kill_loses_no_step_that_memory_has(bench, tmp_path, job.plain, reference(job.plain), job.kill)


def an_audit_finds_a_flipped_bit(case: str, job: Job, bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """The case is where the bit is."""
    contract.an_audit_finds_a_flipped_bit(bench, tmp_path, job.audited, reference, case)


def a_run_directory_below_a_file_is_refused(job: Job, bench: contract.Bench, tmp_path: Path) -> None:
    contract.no_run_directory_below_a_file(bench, tmp_path, job.plain, ranks=job.ranks)


def any_damage_of_any_file_is_found(job: Job, bench: contract.Bench, killed: Any, tmp_path: Path) -> None:
    """Law 4, without a launch."""
    source = tmp_path / "killed" / bench.run_directory
    killed(tmp_path / "killed", {**job.everything, "kill": job.kill})
    paths = [path.relative_to(source) for path in source.rglob("*") if path.is_file()]
    files = [path.as_posix() for path in sorted(paths) if path.parts[0] in (job.newest, f"{job.newest}.resume")]
    assert {*job.damages} <= {*files}
    contract.every_damage_is_found(source, tmp_path / "run", files, job.foreign, newest=job.newest, before=job.before)


def a_damaged_file_of_any_kind_takes_the_previous_checkpoint(
    case: str, job: Job, bench: contract.Bench, reference: Any, killed: Any, tmp_path: Path
) -> None:
    """Law 4, and to the end; the case is the file."""
    killed(tmp_path / "killed", {**job.everything, "kill": job.kill})
    contract.damaged_is_passed_over(
        bench,
        tmp_path / "run",
        tmp_path / "killed",
        job.everything,
        DAMAGES[job.damages[case]],
        case,
        newest=job.newest,
        before=job.before,
    ).require_success()
    trace = contract.read_trace(tmp_path / "run")
    contract.require_same_steps(trace, reference(job.everything), start=10)
    contract.require_same_end(trace, reference(job.everything))

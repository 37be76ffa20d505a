"""Run directories on disks that each node has alone: the nodes agree on what they resume from, whatever happens.

The nodes are threads of this process, so that each operation of each can be the one before which it is killed.
"""

from __future__ import annotations

import errno
import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from resume_adapters import KeepAll, KeepLast, Memory
from resume_adapters.core.checkpoint.manifest import decode_manifest
from resume_adapters.core.ranks import SINGLE_PROCESS, DistributedRanks
from resume_adapters.core.run_directory.control import Fencing
from resume_adapters.core.run_directory.status import RunState
from resume_adapters.core.state.stateful import StaticState
from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.errors import (
    CheckpointsExist,
    NoValidCheckpoint,
    PeerFailed,
    ResumeError,
    SaveFailed,
    StateMismatch,
    UnsupportedSetting,
)
from selection import often

import faults
import miniature
from faults import Crash
from miniature import GivenContent, Miniature, MiniatureContent, new_run
from plain_torch import Still
from rank_threads import NODES, Mortal, on_nodes


def disk(directory: Path, rank: int, ranks: int = NODES) -> Path:
    """Return the run directory of the node of a rank."""
    return directory / f"node-{rank // (ranks // NODES)}"


def committing(directory: Path, *saves: tuple[int, str], **options: Any) -> Callable[[int, dict[str, Any]], Any]:
    """Return the work of saving some steps; it returns the step and the text that it resumed from."""

    def work(rank: int, own: dict[str, Any]) -> tuple[int, str]:
        job = Miniature(disk(directory, rank, own["ranks"].world_size), **own, **options)
        resumed = job.step, job.text
        for step, text in saves:
            job.commit(step, text)
        return resumed

    return work


def left(directory: Path) -> list[dict[str, int]]:
    return [miniature.committed(disk(directory, node)) for node in range(NODES)]


THREE = [(10, "ten"), (20, "twenty"), (30, "thirty")]


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """Three checkpoints on each of two nodes, of one rank each."""
    directory = tmp_path / "three"
    assert on_nodes(committing(directory, *THREE)) == [(0, "")] * NODES
    return directory


@pytest.mark.parametrize("is_node_local", [False, True])
def test_each_node_holds_the_files_of_all_ranks_or_of_its_own(tmp_path: Path, is_node_local: bool) -> None:
    """On two nodes of two ranks each: every file is answered for once, by a rank of its node."""
    directory = tmp_path / "run"
    work = committing(directory, *THREE, keep=KeepLast(2), is_node_local=is_node_local)
    assert on_nodes(work, ranks=4) == [(0, "")] * 4
    assert left(directory) == [{"checkpoint-20": 20, "checkpoint-30": 30}] * NODES
    for node, ranks in enumerate(((0, 1), (2, 3))):
        found = decode_manifest(
            (directory / f"node-{node}" / "checkpoint-30" / "resume" / "manifest.json").read_bytes()
        )
        assert found.ranks == (ranks if is_node_local else None)
        assert sorted((entry.path, entry.rank) for entry in found.files) == [
            ("model.bin", ranks[0]),
            ("resume/ema.json", ranks[0]),
            ("resume/ema.safetensors", ranks[0]),
            *((f"resume/rank-{each:05d}.json", ranks[each % 2]) for each in (ranks if is_node_local else range(4))),
        ]
        assert not miniature.leftovers(directory / f"node-{node}")
    assert on_nodes(committing(directory), ranks=4) == [(30, "thirty")] * 4


def test_each_start_has_one_generation_on_all_nodes(three: Path) -> None:
    """Also where one has lost its count. What the run was left as, rank zero's node says for all."""
    (three / "node-1" / ".resume" / "generation").unlink()

    def begin(rank: int, options: dict[str, Any]) -> tuple[int, int, str]:
        job = Miniature(disk(three, rank), **options)
        former = job.run.previous.state if job.run.previous else ""
        job.run.set_state(RunState.FINISHED, step=job.step)
        return (
            job.run.generation,
            Fencing(LocalStorage(), disk(three, rank) / ".resume", lambda: 0.0).generation(),
            former,
        )

    assert on_nodes(begin) == [(2, 2, "running")] * NODES
    assert on_nodes(begin) == [(3, 3, "finished")] * NODES
    (three / "node-0" / ".resume" / "status.json").unlink()
    assert on_nodes(begin) == [(4, 4, "")] * NODES


def test_what_each_rank_saved_is_known_to_all_though_no_rank_sees_it_all(tmp_path: Path) -> None:
    """The proof of spread state, and another topology of the same ranks, ask for it."""

    def work(rank: int, options: dict[str, Any]) -> Any:
        still = Still(rank, lambda: {"model": {"weight": torch.tensor([float(rank)])}})
        session = still.session(new_run(disk(tmp_path, rank), **options))
        context = session.context
        if context is None:
            session.save("checkpoint-1", 1, still)
        else:
            context.verify_shards(still.sharded_state)
        session.close()
        return [state.rank for state in context.all_rank_states()] if context else None

    assert on_nodes(work) == [None] * NODES
    assert on_nodes(work) == [[0, 1]] * NODES


# ---- Kills


SCENARIOS: dict[str, tuple[list[tuple[int, str]], set[tuple[int, str]]]] = {
    "save and prune": ([(40, "forty")], {(30, "thirty"), (40, "forty")}),
    "save again": ([(30, "thirty again"), (40, "forty")], {(30, "thirty"), (30, "thirty again"), (40, "forty")}),
}


@pytest.mark.parametrize("is_node_local", [False, pytest.param(True, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("killed", [0, *(pytest.param(each, marks=pytest.mark.thorough) for each in range(1, NODES))])
@pytest.mark.parametrize("scenario", often(SCENARIOS, "save again"))  # which saves and prunes too
def test_a_kill_of_a_node_before_any_operation_resumes_all_from_one_save(
    three: Path, tmp_path: Path, scenario: str, killed: int, is_node_local: bool
) -> None:
    """Every other operation of one node, and the others of the other."""
    saves, allowed = SCENARIOS[scenario]
    saving = functools.partial(committing, is_node_local=is_node_local, keep=KeepLast(1))
    counting = [Mortal() for _ in range(NODES)]
    shutil.copytree(three, tmp_path / "counted", symlinks=True)
    on_nodes(saving(tmp_path / "counted", *saves), counting)
    resumed = set()
    for at in range(killed, len(counting[killed].operations), NODES):
        directory = tmp_path / str(at)
        shutil.copytree(three, directory, symlinks=True)
        disks = [Mortal(at if node == killed else None) for node in range(NODES)]
        ends = on_nodes(saving(directory, *saves), disks)
        assert isinstance(ends[killed], Crash)
        where = f"stopped before {disks[killed].operations[-1]}, operation {at}"
        found = on_nodes(saving(directory, (50, "fifty")))
        assert found[0] == found[1] and found[0] in allowed, f"{where}: {found}"
        resumed.add(found[0])
        assert left(directory) == [{"checkpoint-50": 50}] * NODES, where
        assert not [path for node in range(NODES) for path in miniature.leftovers(disk(directory, node))], where
        shutil.rmtree(directory)
    assert resumed == allowed


def test_what_another_node_has_not_committed_is_set_aside(three: Path) -> None:
    """Node one was killed in its commit of step 30, or before it had begun that save."""
    own = three / "node-1" / "checkpoint-30" / "resume"
    (own / "manifest.json").rename(own / "pending")
    assert on_nodes(committing(three)) == [(20, "twenty")] * NODES
    assert left(three) == [{"checkpoint-10": 10, "checkpoint-20": 20}] * NODES
    assert [miniature.set_aside(disk(three, node)) for node in range(NODES)] == [["checkpoint-30.1"], []]
    shutil.rmtree(three / "node-0" / "checkpoint-20")
    assert on_nodes(committing(three)) == [(10, "ten")] * NODES
    assert [miniature.set_aside(disk(three, node)) for node in range(NODES)] == [
        ["checkpoint-30.1"],
        ["checkpoint-20.1"],
    ]


# ---- Damage


def test_a_file_damaged_on_one_node_takes_all_to_the_checkpoint_before(three: Path) -> None:
    faults.flip(three / "node-1" / "checkpoint-30" / "resume" / "rank-00001.json")
    reasons: list[str] = []

    def work(rank: int, options: dict[str, Any]) -> int:
        job = Miniature(disk(three, rank), **options)
        reasons.extend(each.reason for each in job.choice.rejected)
        return job.step

    assert on_nodes(work) == [20] * NODES
    assert len(reasons) == NODES and all("rank 1: resume/rank-00001.json has the digest" in each for each in reasons)
    assert [miniature.set_aside(disk(three, node)) for node in range(NODES)] == [["checkpoint-30.1"]] * NODES


def test_other_saves_of_a_step_do_not_belong_together(three: Path, tmp_path: Path) -> None:
    """A node was given the disk of another run, whose steps have the same names."""
    on_nodes(committing(tmp_path / "other", *THREE))
    shutil.rmtree(three / "node-1")
    (tmp_path / "other" / "node-1").rename(three / "node-1")
    refused = on_nodes(committing(three))
    assert all(isinstance(each, NoValidCheckpoint) for each in refused)
    assert "different saves of step 30" in str(refused[0])


def test_a_node_whose_disk_is_empty_gets_what_the_others_have(three: Path, tmp_path: Path) -> None:
    faults.flip(three / "node-0" / "checkpoint-30" / "model.bin")
    shutil.rmtree(three / "node-1")
    refused = on_nodes(committing(three, resume="scratch"))
    assert [type(each) for each in refused] == [CheckpointsExist] * NODES
    assert on_nodes(committing(three, (25, "more"))) == [(20, "twenty")] * NODES
    first, second = (each.keys() for each in left(three))
    assert first - second == {"checkpoint-10"} and second == {"checkpoint-20", "checkpoint-25"}
    for each in (three / "node-1" / "checkpoint-20").rglob("*.*"):
        original = three / "node-0" / each.relative_to(three / "node-1")
        assert not each.is_file() or each.read_bytes() == original.read_bytes()
    assert not miniature.leftovers(three / "node-1")


def test_a_kill_while_an_empty_node_gets_a_checkpoint_loses_nothing(three: Path) -> None:
    def start(*disks: Mortal) -> list[Any]:
        shutil.rmtree(three / "node-1", ignore_errors=True)
        return on_nodes(committing(three), disks)

    counting = [Mortal() for _ in range(NODES)]
    assert start(*counting) == [(30, "thirty")] * NODES
    for killed, disk_of_it in enumerate(counting):
        for at in range(killed, len(disk_of_it.operations), 3):
            ends = start(*(Mortal(at if node == killed else None) for node in range(NODES)))
            assert isinstance(ends[killed], Crash)
            assert on_nodes(committing(three)) == [(30, "thirty")] * NODES, f"node {killed}, operation {at}"


@pytest.mark.parametrize("failing", range(NODES))
def test_a_save_that_fails_on_one_node_fails_on_all_and_the_next_one_works(tmp_path: Path, failing: int) -> None:
    counting = faults.no_space(10**9)
    on_nodes(committing(tmp_path / "counted", (10, "ten")), [counting, LocalStorage()][:: -1 if failing else 1])
    before = len(counting.operations)

    def work(rank: int, options: dict[str, Any]) -> Any:
        job = Miniature(disk(directory, rank), **options, keep=KeepLast(1))
        job.commit(10)
        if isinstance(job.run.storage, faults.FailingStorage):
            job.run.storage.fail_at = len(job.run.storage.operations) + at
        heard = None
        try:
            job.commit(20)
        except ResumeError as error:
            heard = type(error)
        job.run.ranks.barrier()
        if isinstance(job.run.storage, faults.FailingStorage):
            job.run.storage.fail_at = None
        job.commit(30)
        return heard

    for at in range(0, before, 2):
        directory = tmp_path / str(at)
        # A full disk would be pruned, and the save tried once more.
        broken = faults.FailingStorage(errno.EIO, 10**9, only=counting.only)
        disks = [broken if node == failing else LocalStorage() for node in range(NODES)]
        heard = on_nodes(work, disks)
        if heard == [None] * NODES:
            break  # the save has fewer operations than the start and the save together
        assert heard == [SaveFailed if node == failing else PeerFailed for node in range(NODES)]
        assert left(directory) == [{"checkpoint-30": 30}] * NODES
        shutil.rmtree(directory)
    assert at > 10


# ---- Retention


def test_what_is_not_whole_on_every_node_takes_no_place_in_a_policy(three: Path) -> None:
    """A prune that was cut short is ended; what is damaged on one node is left alone on all."""
    shutil.rmtree(three / "node-1" / "checkpoint-10")
    on_nodes(committing(three, (40, "forty"), keep=KeepAll()))
    assert left(three)[0] == {f"checkpoint-{step}": step for step in (10, 20, 30, 40)}, "a policy keeps it"
    faults.cut(three / "node-1" / "checkpoint-20" / "model.bin")
    on_nodes(committing(three, (50, "fifty"), keep=KeepLast(2)))
    assert left(three) == [{f"checkpoint-{step}": step for step in (20, 40, 50)}] * NODES


# ---- Refusals


def test_where_each_node_has_all_files_the_nodes_may_change_places(three: Path) -> None:
    """Or the run goes on in one directory."""
    assert on_nodes(lambda rank, options: Miniature(disk(three, 1 - rank), **options).text) == ["thirty"] * NODES
    assert on_nodes(lambda rank, options: Miniature(disk(three, 0), **options).text) == ["thirty"] * NODES


def test_a_part_of_a_checkpoint_is_taken_by_the_ranks_whose_it_is(tmp_path: Path) -> None:
    """Not where the nodes have changed places, nor by more ranks or fewer. The running run is not disturbed."""
    three = tmp_path / "three"
    on_nodes(committing(three, *THREE, is_node_local=True))
    swapped = on_nodes(lambda rank, options: Miniature(disk(three, 1 - rank), **options))
    more = on_nodes(committing(three), ranks=2 * NODES)
    for refused in (swapped, more):
        assert {type(each) for each in refused} <= {StateMismatch, PeerFailed}
        assert "holds the files of the ranks" in str(refused[0])
    with pytest.raises(StateMismatch, match=r"the ranks 0 of 2, and this process is rank 0 of 1\. Launch as many"):
        Miniature(three / "node-0")
    assert Fencing(LocalStorage(), three / "node-0" / ".resume", lambda: 0.0).generation() == 1
    assert on_nodes(committing(three)) == [(30, "thirty")] * NODES


def test_a_directory_that_is_not_one_nodes_is_refused(tmp_path: Path) -> None:
    """Nodes share it, or the ranks of a node do not."""
    shared = on_nodes(lambda rank, options: Miniature(tmp_path / "shared", **options, is_node_local=True))
    apart = on_nodes(lambda rank, options: Miniature(tmp_path / str(rank), **options), ranks=4)
    for refused, seen in ((shared, "the ranks 0, 1 see it"), (apart, "the ranks 1 see it")):
        assert [type(each) for each in refused] == [UnsupportedSetting] * len(refused)
        assert seen in str(refused[0])
    assert not list((tmp_path / "shared" / ".resume").iterdir())


@pytest.mark.parametrize("of", ["no group", "a group"])
def test_of_one_node_the_directory_holds_all(tmp_path: Path, of: str) -> None:
    """So that it can be resumed where all nodes share one."""
    if of == "a group":
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        job = Miniature(tmp_path, ranks=DistributedRanks() if of == "a group" else SINGLE_PROCESS, is_node_local=True)
        job.commit(10, "ten")
        assert (job.run.storage_group.is_leader, job.run.storage_group.is_partial) == (True, False)
        assert job.run.storage_group.leaders.gather("led here") == ["led here"]
        job.run.close()
    finally:
        if of == "a group":
            dist.destroy_process_group()
    found = decode_manifest((tmp_path / "checkpoint-10" / "resume" / "manifest.json").read_bytes())
    assert found.ranks is None
    assert Miniature(tmp_path).text == "ten"


# ---- Memory


def test_each_node_keeps_the_files_of_its_ranks_in_its_memory(tmp_path: Path) -> None:
    """What one of two nodes has lost, no node resumes from."""
    directory = tmp_path / "run"

    def work(rank: int, own: dict[str, Any]) -> tuple[int, str]:
        memory = disk(directory, rank, 4) / "memory"
        if own["ranks"].local_rank == 0:
            memory.mkdir(parents=True, exist_ok=True)
        own["ranks"].barrier()
        job = Miniature(disk(directory, rank, 4) / "disk", **own, mirror=[Memory(directory=str(memory), save_every=1)])
        resumed = job.step, job.text
        job.run.begin(job.step, 0.0)
        job.commit(job.step + 10, "on the disk")
        for step in (job.step + 11, job.step + 12):
            text = f"in memory at {step}"
            job.run.saver.save_to_memory(f"checkpoint-{step}", step, MiniatureContent(job.run, text, step, None, None))
        job.run.close()
        return resumed

    assert on_nodes(work, ranks=4) == [(0, "")] * 4
    assert on_nodes(work, ranks=4) == [(12, "in memory at 12")] * 4
    shutil.rmtree(directory / "node-1" / "memory")
    assert on_nodes(work, ranks=4) == [(22, "on the disk")] * 4


def test_nodes_that_share_a_run_directory_copy_what_is_committed_to_their_memories(tmp_path: Path) -> None:
    def work(rank: int, own: dict[str, Any], save_every: int | None = None) -> int:
        memory = tmp_path / f"memory-{rank}"
        memory.mkdir(exist_ok=True)
        options = {**own, "mirror": [Memory(directory=str(memory), save_every=save_every)]}
        job = Miniature(tmp_path / "run", **options)
        job.run.begin(job.step, 0.0)
        job.commit(job.step + 10)
        (held,) = memory.glob("*/*")
        job.run.set_state(RunState.STOPPED)
        job.run.finish_copies()
        assert not held.exists()
        job.run.close()
        return job.step

    assert on_nodes(work) == [0] * NODES
    assert on_nodes(work) == [10] * NODES
    assert on_nodes(lambda rank, own: work(rank, own, save_every=1)) == [20] * NODES


@pytest.mark.parametrize("disks", ["shared", "own"])
def test_what_differs_between_ranks_of_several_nodes_comes_back_to_each(tmp_path: Path, disks: str) -> None:
    """In the memory of the nodes, and where each has a run directory: each node has the files of all ranks."""

    def work(rank: int, own: dict[str, Any]) -> list[Any]:
        node = tmp_path / f"node-{rank}"
        (node / "memory").mkdir(parents=True, exist_ok=True)
        own["ranks"].barrier()
        options = {**own, "mirror": [Memory(directory=str(node / "memory"), save_every=1)]}
        run = new_run((node if disks == "own" else tmp_path) / "run", **options)
        resumed = run.open().checkpoint
        if resumed is not None:
            return [run.reader(resumed).part(name) for name in ("same", "other")]
        parts = {"same": StaticState({"of": 7}), "other": StaticState({"of": rank})}
        content = GivenContent(lambda path: path.joinpath("a").write_text("a") if rank == 0 else None, parts)
        run.begin(0, 0.0)
        run.saver.save("checkpoint-1", 1, content)
        run.saver.save_to_memory("checkpoint-2", 2, content)
        run.close()
        return []

    assert on_nodes(work) == [[], []]
    assert on_nodes(work) == [[{"of": 7}, {"of": rank}] for rank in range(NODES)]

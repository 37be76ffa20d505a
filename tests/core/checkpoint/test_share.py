"""Each node of several has all files of a checkpoint of which one rank has written most, or none has the checkpoint."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from resume_adapters.core.checkpoint import writer
from resume_adapters.core.checkpoint.commit import PendingCheckpoint
from resume_adapters.core.checkpoint.layout import EXTRAS, CheckpointState, state_of
from resume_adapters.core.checkpoint.manifest import Manifest
from resume_adapters.core.checkpoint.resolve import open_checkpoint
from resume_adapters.core.checkpoint.writer import write_checkpoint
from resume_adapters.core.storage.groups import shared_by_some
from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.errors import PeerFailed, SaveFailed

from miniature import Foreign, GivenContent
from rank_threads import NODES, on_nodes

NO_FOREIGN = Foreign(lambda path: None)
LARGE = bytes(range(256)) * 40_000
"""More than one piece."""


def saving(directory: Path, ranks: int, *, is_file: bool = False) -> Callable[[int, dict[str, Any]], Any]:
    """Return the work of one rank: rank zero writes what all read, and each a file of its own, as frameworks do."""
    of_node = ranks // NODES

    def work(rank: int, own: dict[str, Any]) -> Any:
        path = directory / f"node-{rank // of_node}" / "checkpoint-3"
        everyone, storage = own["ranks"], own["storage"]
        storage.make_directory(path.parent)
        seen = [tuple(range(each - each % of_node, each - each % of_node + of_node)) for each in range(ranks)]

        def write(place: Path) -> None:
            if rank == 0:
                (place if is_file else place / "model.bin").write_bytes(LARGE)
            if not is_file:
                (place / f"random-{rank}").write_text(f"of rank {rank}")
                (place / "each-node").write_text(f"of node {rank // of_node}")

        def nothing() -> None:
            """Nobody else uses the directory."""

        pending = PendingCheckpoint(
            storage, everyone, path, 3, nothing, is_file=is_file, storage_group=shared_by_some(everyone, seen)
        )
        try:
            pending.open()
            written = write_checkpoint(pending, GivenContent(write), lambda: 1.0)
            pending.commit(
                everyone,
                written.files,
                lambda files: Manifest(
                    step=3, epoch=0.0, world_size=ranks, generation=1, written=1.0, reason="", files=files
                ),
            )
        finally:
            pending.release()
        return {each.path: each.rank for each in open_checkpoint(storage, path, NO_FOREIGN).manifest.files}

    return work


@pytest.mark.parametrize("is_file", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_each_node_has_what_any_rank_has_written(tmp_path: Path, ranks: int, is_file: bool) -> None:
    found = on_nodes(saving(tmp_path, ranks, is_file=is_file), ranks=ranks)
    assert {*found[0]} == {*found[-1]} >= {f"{EXTRAS}/rank-{rank:05}.json" for rank in range(ranks)}
    assert {rank // (ranks // NODES) for rank in found[0].values()} == {0}
    assert {rank // (ranks // NODES) for rank in found[-1].values()} == {1}, "its ranks have forced them to the disk"
    for node in range(NODES):
        checkpoint = tmp_path / f"node-{node}" / "checkpoint-3"
        assert (checkpoint if is_file else checkpoint / "model.bin").read_bytes() == LARGE
        if not is_file:
            assert (checkpoint / "each-node").read_text() == f"of node {node}", "it has one of its own"


class Full(LocalStorage):
    """A node that has no room for large files."""

    def write_range(self, path: Path, offset: int, content: bytes | memoryview) -> None:
        if offset:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        super().write_range(path, offset, content)


def require_none(directory: Path, found: list[Any], guilty: int) -> None:
    """Assert that the error came on one node, that all know of it, and that nothing is left."""
    kinds = [SaveFailed if rank == guilty else PeerFailed for rank in range(len(found))]
    assert [type(each) for each in found] == kinds, found
    for node in range(NODES):
        assert state_of(LocalStorage(), directory / f"node-{node}" / "checkpoint-3") is CheckpointState.REMOVED


def test_a_node_without_room_leaves_no_checkpoint_anywhere(tmp_path: Path) -> None:
    found = on_nodes(saving(tmp_path, 2), [LocalStorage(), Full()])
    require_none(tmp_path, found, guilty=1)
    assert found[1].errno == errno.ENOSPC


def test_what_cannot_be_read_leaves_no_checkpoint_anywhere(tmp_path: Path) -> None:
    class Broken(LocalStorage):
        def read_range(self, path: Path, offset: int, count: int) -> bytes:
            raise OSError(errno.EIO, "Input/output error", str(path))

    found = on_nodes(saving(tmp_path, 2), [Broken(), LocalStorage()])
    assert [type(each) for each in found] == [SaveFailed, SaveFailed], "both see it"
    assert "the sender could not read it" in found[1].message


def test_what_changes_on_the_way_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native = writer._Sent.__iter__

    def changed(sent: Any) -> Iterator[bytes]:
        for piece in native(sent):
            yield piece[:-1] + b"?"

    monkeypatch.setattr(writer._Sent, "__iter__", changed)
    found = on_nodes(saving(tmp_path, 2))
    assert "came over as" in found[1].message and "was sent as" in found[1].message

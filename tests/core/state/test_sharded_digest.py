"""The digest of sharded state: the same for any sharding, different for any other content."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from resume_adapters.core.ranks import SingleProcess
from resume_adapters.core.run.run import ResumableRun
from resume_adapters.core.session.session import Session
from resume_adapters.core.state.comparison import first_difference
from resume_adapters.core.state.sharded_digest import combine, fingerprint, shard_digest
from resume_adapters.errors import NotRestored

from plain_torch import Still

LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
    "rows over two": ((2,), (Shard(0),)),
    "rows over three, unevenly": ((3,), (Shard(0),)),
    "more ranks than rows": ((8,), (Shard(0),)),
    "columns": ((3,), (Shard(1),)),
    "rows and columns": ((2, 2), (Shard(0), Shard(1))),
    "twice over the rows": ((2, 2), (Shard(0), Shard(0))),
    "copied over two, cut over two": ((2, 2), (Replicate(), Shard(0))),
    "on every rank": ((2,), (Replicate(),)),
}

STATE = {
    "weight": torch.randn(5, 3, 2, generator=torch.Generator().manual_seed(1)),
    "half": torch.arange(20).reshape(5, 4).to(torch.bfloat16),
    "complex": torch.randn(4, 4, generator=torch.Generator().manual_seed(2), dtype=torch.complex128),
    "counts": torch.arange(6).reshape(2, 3),
    "rate": [0.1, {"steps": torch.tensor(3.0), "empty": torch.empty(0, 2)}],
}


def whole(state: Any) -> dict[str, int]:
    before = copy.deepcopy(state)
    found = {"state": shard_digest(state, is_first=True)}
    assert first_difference(before, state) is None, "what is looked at must stay as it is"
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_shares_of_all_ranks_give_the_digest_of_the_whole(layout: str) -> None:
    sizes, placements = LAYOUTS[layout]
    ranks = torch.tensor(sizes).prod().item()
    shares = []
    for rank in range(int(ranks)):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=int(ranks))
        try:
            mesh = init_device_mesh("cpu", sizes)
            cut = {
                name: distribute_tensor(value, mesh, placements, src_data_rank=None)
                if isinstance(value, torch.Tensor)
                else value
                for name, value in STATE.items()
            }
            shares.append({"state": shard_digest(cut, is_first=rank == 0)})
        finally:
            dist.destroy_process_group()
    assert combine(shares) == whole(STATE)


def test_a_rank_that_holds_nothing_adds_nothing() -> None:
    """Its process is not among those that a tensor is sharded over."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        mesh = DeviceMesh("cpu", [0], _init_backend=False)
        assert mesh.get_coordinate() is None
        cut = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False, shape=torch.Size([2]), stride=(1,))
        assert shard_digest({"weight": cut}, is_first=False) == 0
    finally:
        dist.destroy_process_group()


def changed(name: str, change: Any) -> dict[str, Any]:
    return {**STATE, name: change(STATE[name].clone() if isinstance(STATE[name], torch.Tensor) else STATE[name])}


OTHERS = {
    "one bit": changed("weight", lambda value: value.view(torch.int32).bitwise_xor_(1 * (torch.arange(2) == 1))),
    "two elements exchanged": changed("weight", lambda value: value.flip(2)),
    "two rows exchanged": changed("half", lambda value: value[torch.tensor([1, 0, 2, 3, 4])]),
    "another shape": changed("half", lambda value: value.reshape(4, 5)),
    "another dtype of the same bits": changed("half", lambda value: value.view(torch.int16)),
    "a part of a complex number": changed("complex", lambda value: value.conj().resolve_conj()),
    "a number": changed("rate", lambda value: [0.1 + 2**-54, value[1]]),
    "tensors exchanged": {**STATE, "weight": STATE["complex"], "complex": STATE["weight"]},
}


@pytest.mark.parametrize("other", OTHERS)
def test_whatever_differs_gives_another_digest(other: str) -> None:
    assert whole(OTHERS[other]) != whole(STATE)


def test_a_fingerprint_changes_with_the_content_and_there_is_none_of_what_is_no_data() -> None:
    before = fingerprint(STATE)
    assert before is not None and fingerprint(copy.deepcopy(STATE)) == before
    for other in ("one bit", "two elements exchanged", "two rows exchanged", "a number", "tensors exchanged"):
        assert fingerprint(OTHERS[other]) not in (before, None), other
    assert fingerprint({**STATE, "hook": object()}) is None


def test_views_and_lazy_conjugates_count_as_what_they_show() -> None:
    state = {
        **STATE,
        "half": STATE["half"].t().contiguous().t(),
        "complex": STATE["complex"].conj().resolve_conj().conj(),
    }
    assert whole(state) == whole(STATE)


def test_what_did_not_come_back_is_an_error_with_its_name(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)

    def sharded() -> dict[str, Any]:
        return {"model": dict(model.named_parameters()), "optimizer": {"rate": 0.1}}

    still = Still(sharded=sharded)

    def session(*, verify: bool = True) -> Session:
        return still.session(ResumableRun(tmp_path, ranks=SingleProcess()), verify=verify)

    def save(saving: Session, step: int) -> None:
        saving.save(f"checkpoint-{step}", step, still)
        saving.close()

    save(session(), 1)
    resumed = session()
    assert resumed.context is not None
    resumed.context.verify_shards(sharded)
    with torch.no_grad():
        model.bias[1] += 1e-6
    with pytest.raises(NotRestored, match=r"^model: .*checkpoint-1"):
        resumed.context.verify_shards(sharded)
    resumed.close()
    save(session(verify=False), 2)
    with torch.no_grad():
        model.bias[1] += 1e-6
    last = session()
    assert last.context is not None
    last.context.verify_shards(sharded)  # nothing was saved to be compared with
    last.close()

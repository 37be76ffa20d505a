"""Law 7 for the Trainer: different ranks, workers or batch splits give the same samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import pytest
from packaging.version import Version

from selection import often

import contract

IS_OLD = Version(accelerate.__version__) < Version("1.13")

ARGS = {"save_steps": 5, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
MAP = {"elastic": True, "augment": True, "dropout": 0.0, "samples": 96}


def on(ranks: int, kill: int | None = None, **args: Any) -> tuple[int, dict[str, Any]]:
    """Return a launch on some ranks, which is killed after a step."""
    given = {**ARGS, **({"ddp_backend": "gloo"} if ranks > 1 else {}), **args}
    strike = {"event": "on_step_end", "step": kill, "rank": 0} if kill else None
    return ranks, {**MAP, "args": given, "kill": strike}


LAUNCHES = {
    "2 to 1": [on(2, 8, gradient_accumulation_steps=1), on(1)],
    "1 to 2": [on(1, 8), on(2, gradient_accumulation_steps=1)],
    "0 to 2 workers and back": [on(1, 8), on(1, 18, dataloader_num_workers=2), on(1)],
    "1 to 2 to 1, in other batches": [
        on(1, 8),
        on(2, 18, per_device_train_batch_size=2, dataloader_num_workers=1),
        on(1, per_device_train_batch_size=8, gradient_accumulation_steps=1),
    ],
    "at the end of an epoch": [on(2, 14, gradient_accumulation_steps=1, save_steps=12), on(1)],
}


SHARDED, FULL = "SHARDED_STATE_DICT", "FULL_STATE_DICT"


def spread(kind: str, ranks: int, kill: int | None = None, batch: int = 6, accumulate: int = 2) -> Any:
    """Return a launch under FSDP2."""
    args = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulate, "save_steps": 3}
    count, config = on(ranks, kill, **args, remove_unused_columns=False)
    return count, {**config, "fsdp": kind}


SHARDS = {
    "sharded, 2 to 1": [spread(SHARDED, 2, 5, batch=3), spread(SHARDED, 1)],
    "sharded, 1 to 2 to 3 to 1": [
        spread(SHARDED, 1, 5),
        spread(SHARDED, 2, 8, batch=3),
        spread(SHARDED, 3, 11, batch=4, accumulate=1),
        spread(SHARDED, 1),
    ],
    "full, 1 to 2 to 1": [spread(FULL, 1, 5), spread(FULL, 2, 8, batch=3), spread(FULL, 1)],
}


@pytest.mark.skipif(IS_OLD, reason="an Accelerate before 1.13 does not load the optimizer of FSDP2")
@pytest.mark.parametrize("case", often(SHARDS))
def test_shards_are_dealt_out_again(case: str, bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """What follows is compared with a run of one process, which has no shards."""
    expected = reference(spread(SHARDED, 1)[1])
    contract.same_samples_on_any_topology(bench, tmp_path, expected, SHARDS[case], tolerance=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("case", LAUNCHES)
def test_every_step_has_the_samples_that_it_would_have_had(
    case: str, bench: contract.Bench, reference: Any, tmp_path: Path
) -> None:
    expected = reference({**MAP, "args": ARGS})
    contract.same_samples_on_any_topology(bench, tmp_path, expected, LAUNCHES[case], tolerance=1e-4)


ORDINARY = {"elastic": False, "augment": False, "rows": True, "samples": 50}


def ordinary(ranks: int, kill: int | None = None, **args: Any) -> tuple[int, dict[str, Any]]:
    """Return a launch with data as scripts have them, in batches of six samples on all ranks together."""
    given = {"per_device_train_batch_size": 6 // ranks, "dataloader_drop_last": True, **args}
    count, config = on(ranks, kill, **given)
    return count, {**config, **ORDINARY}


def accelerator(**config: Any) -> dict[str, Any]:
    return {"accelerator_config": config}


SPLIT = {"per_device_train_batch_size": 6, **accelerator(split_batches=True)}
ORDINARY_LAUNCHES = {
    "2 to 1": [ordinary(2, 7), ordinary(1)],
    "1 to 3 to 2": [ordinary(1, 7), ordinary(3, 12), ordinary(2)],
    "less accumulation": [ordinary(1, 7), ordinary(2, per_device_train_batch_size=6, gradient_accumulation_steps=1)],
    "split batches": [ordinary(2, 7, **SPLIT), ordinary(3, **SPLIT)],
    "at the end of an epoch": [ordinary(2, 9, save_steps=8), ordinary(1, save_steps=8)],
}


@pytest.mark.parametrize("case", often(ORDINARY_LAUNCHES, "2 to 1"))
def test_an_ordinary_loader_goes_on(case: str, bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    launches = ORDINARY_LAUNCHES[case]
    ranks, config = launches[0]
    expected = reference({**config, "kill": None}, ranks)
    contract.same_samples_on_any_topology(bench, tmp_path, expected, launches, tolerance=1e-4)


def stream(ranks: int, kill: int | None = None, *, workers: int) -> tuple[int, dict[str, Any]]:
    """Return a launch that reads 96 records in 24 steps."""
    args = {"per_device_train_batch_size": 4 // ranks, "gradient_accumulation_steps": 1, "max_steps": 24}
    count, config = on(ranks, kill, **args, dataloader_num_workers=workers)
    return count, {**config, "data": "stream", "shard": 8, "augment": False}


def test_every_record_of_a_stream_is_trained_on_once(bench: contract.Bench, tmp_path: Path) -> None:
    launches = [stream(1, 8, workers=2), stream(2, 13, workers=0), stream(2, 18, workers=1), stream(1, workers=3)]
    contract.every_record_once_on_any_topology(bench, tmp_path, launches, 96)


def test_another_global_batch_is_refused(bench: contract.Bench, tmp_path: Path) -> None:
    ranks, config = on(2, 8)
    assert bench.run(tmp_path, config, ranks=ranks).killed
    outcome = bench.run(tmp_path, on(1)[1])
    assert outcome.statuses == (1,)
    assert "an optimizer step had 16 samples and would now have 8" in outcome.output
    assert 'on_batch_change="keep-samples"' in outcome.output
    assert not any(contract.read_trace(tmp_path).steps)


def test_another_global_batch_goes_on_by_samples(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    keep = {"callback": {"on_batch_change": "keep-samples"}, "samples": 48}
    between = on(1, 11, per_device_train_batch_size=16, gradient_accumulation_steps=1)
    last = on(2, gradient_accumulation_steps=4)  # begins in the middle of an accumulation
    launches = [(ranks, {**config, **keep}) for ranks, config in (on(1, 8), between, last)]
    contract.goes_on_by_samples(bench, tmp_path, launches, 3 * 48, reference(launches[-1][1], 2))

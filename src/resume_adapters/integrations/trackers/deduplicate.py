"""What of W&B, MLflow and TensorBoard is wrapped, so that a run has each value once.

None of them has a public way to pass over what a run has. Each is wrapped once, when a checkpoint says that it was in
use; ``tests/stores.py`` reads their stores.
"""

from __future__ import annotations

import functools
import glob
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

Known = set[tuple[str, int]]
"""Names and steps of what a run has."""


def _wrap(owner: Any, name: str, method: Callable[..., Any]) -> None:
    """Let ``method`` stand before a method of a class; it gets the former as its first argument."""
    former = getattr(owner, name)

    @functools.wraps(former)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return method(former, *args, **kwargs)

    setattr(owner, name, wrapper)


# ---- W&B


def log_rows_once(run: str, following: int) -> None:
    """Give the rows of a run the steps that they had, or would have had, without the kill.

    A row that is logged again so has its former step. Online, W&B ignores a step that lies behind what the run has;
    offline, nothing is logged that an earlier launch's log has.

    Args:
        run: its id.
        following: the step of the first row after the checkpoint.
    """
    import wandb

    if wandb.run is not None and wandb.run.id == run and wandb.run.step > wandb.run.starting_step:
        return  # this process has logged since the checkpoint, so the run itself knows where it is
    known: Known | None = None

    def log(native: Any, self: Any, data: Any, step: int | None = None, commit: bool | None = None) -> None:
        nonlocal following, known
        if self.id == run:
            if step is None:
                step, commit = following, commit is not False
                following += commit
            if known is None:
                known = _offline_rows(self) if self.offline else set()
            data = {name: value for name, value in data.items() if (name, step) not in known}
            if not data:
                return
        native(self, data, step, commit)

    _wrap(wandb.Run, "log", log)  # seam: wandb 0.31


def _offline_rows(run: Any) -> Known:
    """Return what earlier launches logged offline to a run. Each launch has a directory of its own."""
    from wandb.proto import wandb_internal_pb2

    protocol: Any = wandb_internal_pb2  # seam: wandb 0.31
    here = Path(run.dir).parent
    known: Known = set()
    for file in here.parent.glob(f"offline-run-*-{glob.escape(run.id)}/*.wandb"):  # seam: wandb 0.31
        if file.parent == here:
            continue
        for record in offline_records(file.read_bytes()):
            items = {each.key or each.nested_key[0]: each for each in protocol.Record.FromString(record).history.item}
            known |= {(name, int(items["_step"].value_json)) for name in items}
    return known


def offline_records(log: bytes) -> Iterator[bytes]:
    """Yield the whole records of W&B's offline log: LevelDB's log format, after a header of 7 bytes."""
    position, block, record = 7, 1 << 15, b""
    while position + 7 <= len(log):
        left = block - position % block
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", log[position : position + 7])
        position += 7
        if position + length > len(log):
            return  # cut off by the kill
        record += log[position : position + length]
        position += length
        if kind in (1, 4):  # the whole of a record, or its last piece
            yield record
            record = b""


# ---- MLflow


def log_metrics_once(run: str) -> None:
    """Pass over metrics that a run has at that step."""
    from mlflow import MlflowClient

    known: Known | None = None

    def is_known(client: Any, key: str, step: int | None) -> bool:
        nonlocal known
        if known is None:
            keys = client.get_run(run).data.metrics
            known = {(name, each.step) for name in keys for each in client.get_metric_history(run, name)}
        return (key, step or 0) in known

    def log_batch(native: Any, self: Any, run_id: str, metrics: Any = (), *args: Any, **kwargs: Any) -> Any:
        if run_id == run:
            metrics = [each for each in metrics if not is_known(self, each.key, each.step)]
        return native(self, run_id, metrics, *args, **kwargs)

    def log_metric(
        native: Any,
        self: Any,
        run_id: str,
        key: str,
        value: Any,
        timestamp: Any = None,
        step: Any = None,
        **kwargs: Any,
    ) -> Any:
        if run_id == run and is_known(self, key, step):
            return None
        return native(self, run_id, key, value, timestamp, step, **kwargs)

    _wrap(MlflowClient, "log_batch", log_batch)  # seam: mlflow 3.17
    _wrap(MlflowClient, "log_metric", log_metric)  # seam: mlflow 3.17


# ---- TensorBoard


def write_summaries_once(directories: Sequence[str]) -> None:
    """Pass over summaries that the event files of these directories, and those below them, have at that step."""
    from torch.utils.tensorboard.writer import FileWriter

    known: dict[str, Known] = {}

    def add_summary(native: Any, self: Any, summary: Any, global_step: Any = None, walltime: Any = None) -> None:
        directory = os.path.abspath(self.get_logdir())
        if any(Path(directory).is_relative_to(each) for each in directories):
            if directory not in known:
                known[directory] = _summaries(directory)
            fresh = [each for each in summary.value if (each.tag, int(global_step or 0)) not in known[directory]]
            if not fresh:
                return
            summary = type(summary)(value=fresh)
        native(self, summary, global_step, walltime)

    _wrap(FileWriter, "add_summary", add_summary)  # seam: torch 2.13


def _summaries(directory: str) -> Known:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    files = sorted(Path(directory).glob("*tfevents*"))
    events = (event for file in files for event in EventFileLoader(str(file)).Load())
    return {(value.tag, event.step) for event in events for value in event.summary.value}

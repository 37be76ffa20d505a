"""The methods of W&B, MLflow and TensorBoard that skip a value which a run already has.

A tracker's class is patched while a context lasts, and has its former methods afterwards. A value is identified by its
name and its step.

The trackers' own ways were tried first, and do not serve:

- TensorBoard has ``SummaryWriter(purge_step=...)``, which writes ``SessionLog.START``. Readers then drop the values of
  every tag from that step on. A tag that counts otherwise, such as the batches of a validation, loses values from
  before the checkpoint, which are not logged again.
- W&B ignores a step that is behind the run's own. Offline, a launch does not know what an earlier one logged: it
  accepts the same steps again, and ``wandb sync`` uploads both.
- MLflow stores each value that it is given.
"""

from __future__ import annotations

import contextlib
import glob
import os
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from resume_adapters.core.patching import wrapped

Logged = set[tuple[str, int]]
"""Names and steps of the values that a run has."""


# ---- W&B


class WandbRows:
    """Logs the rows of a W&B run with the steps that they had, or would have had, without the kill.

    A row that is logged again then has its former step. Online, W&B ignores a step that is behind the run's own.
    Offline, what the log of an earlier launch has is skipped.

    Args:
        run_id: the run's id.
        next_step: the step of the first row after the checkpoint.

    Attributes:
        run_id: the run's id.
        next_step: the step of the next row. W&B itself starts at 0 offline, and online behind what was logged before
            the kill.
    """

    def __init__(self, run_id: str, next_step: int) -> None:
        self.run_id = run_id
        self.next_step = next_step
        self._logged: Logged | None = None

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """Patch W&B while the context lasts."""
        import wandb

        try:
            with wrapped(wandb.Run, "log", self._log):  # seam: wandb 0.31
                _bind_wandb_log()
                yield
        finally:
            _bind_wandb_log()

    def _log(self, native: Any, run: Any, data: Any, step: int | None = None, commit: bool | None = None) -> None:
        if run.id == self.run_id:
            if step is None:
                step, commit = self.next_step, commit is not False
            self.next_step = max(self.next_step, step + bool(commit))  # as W&B counts
            if self._logged is None:
                self._logged = _offline_rows(run) if run.offline else set()
            data = {name: value for name, value in data.items() if (name, step) not in self._logged}
            if not data:
                return
        native(run, data, step, commit)


def resumed_wandb_rows(run_id: str, next_step: int) -> WandbRows | None:
    """Return what logs the rows of a run with their former steps; ``None`` if the run itself knows its step.

    It does where this process has logged to it before the resume.
    """
    import wandb

    if wandb.run is not None and wandb.run.id == run_id and wandb.run.step > wandb.run.starting_step:
        return None
    return WandbRows(run_id, next_step)


def _bind_wandb_log() -> None:
    """Let ``wandb.log`` be the method that the run's class has now: W&B looks it up once, when the run starts."""
    import wandb

    if (run := wandb.run) is not None and getattr(wandb.log, "__self__", None) == run:
        wandb.log = run.log


def _offline_rows(run: Any) -> Logged:
    """Return what earlier launches logged offline to a run. Each launch has a directory of its own."""
    from wandb.proto import wandb_internal_pb2

    protocol: Any = wandb_internal_pb2  # seam: wandb 0.31
    here = Path(run.dir).parent
    logged: Logged = set()
    for file in here.parent.glob(f"offline-run-*-{glob.escape(run.id)}/*.wandb"):  # seam: wandb 0.31
        if file.parent == here:
            continue
        for record in offline_records(file.read_bytes()):
            items = {each.key or each.nested_key[0]: each for each in protocol.Record.FromString(record).history.item}
            logged |= {(name, int(items["_step"].value_json)) for name in items}
    return logged


def offline_records(log: bytes) -> Iterator[bytes]:
    """Yield the complete records of W&B's offline log: LevelDB's log format, after a header of 7 bytes.

    W&B 0.31 has no reader of its own in Python.
    """
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
        if kind in (1, 4):  # a whole record, or its last piece
            yield record
            record = b""


# ---- MLflow


@contextlib.contextmanager
def mlflow_metrics(run: str) -> Iterator[None]:
    """Skip metrics that an MLflow run already has at that step.

    Args:
        run: the run's id.
    """
    from mlflow import MlflowClient

    logged: Logged | None = None

    def is_logged(client: Any, key: str, step: int | None) -> bool:
        nonlocal logged
        if logged is None:
            keys = client.get_run(run).data.metrics
            logged = {(name, each.step) for name in keys for each in client.get_metric_history(run, name)}
        return (key, step or 0) in logged

    def log_batch(native: Any, client: Any, run_id: str, metrics: Any = (), *args: Any, **kwargs: Any) -> Any:
        if run_id == run:
            metrics = [each for each in metrics if not is_logged(client, each.key, each.step)]
        return native(client, run_id, metrics, *args, **kwargs)

    def log_metric(
        native: Any,
        client: Any,
        run_id: str,
        key: str,
        value: Any,
        timestamp: Any = None,
        step: Any = None,
        **kwargs: Any,
    ) -> Any:
        if run_id == run and is_logged(client, key, step):
            return None
        return native(client, run_id, key, value, timestamp, step, **kwargs)

    with (
        wrapped(MlflowClient, "log_batch", log_batch),  # seam: mlflow 3.17
        wrapped(MlflowClient, "log_metric", log_metric),  # seam: mlflow 3.17
    ):
        yield


# ---- TensorBoard


def event_files(directories: Sequence[str]) -> dict[str, int]:
    """Return the size of each event file in these directories, or in those below them, by its path."""
    found = (file for each in directories for file in Path(each).rglob(_EVENTS))
    return {str(file): file.stat().st_size for file in found}


def tensorboard_summaries(
    directories: Sequence[str], sizes: Mapping[str, int]
) -> contextlib.AbstractContextManager[None]:
    """Skip summaries that the event files of these directories, or of those below them, already have.

    Summaries behind the checkpoint are logged again, each as often as it was. Of those before it, what a launch logs at
    its start is logged again too, with the same value.

    Args:
        directories: absolute paths.
        sizes: what :func:`event_files` returned when the checkpoint was saved; empty if an earlier version saved it.
    """
    from torch.utils.tensorboard.writer import FileWriter

    logged: dict[str, _Summaries] = {}

    def add_summary(native: Any, writer: Any, summary: Any, global_step: Any = None, walltime: Any = None) -> None:
        directory = os.path.abspath(writer.get_logdir())
        if any(Path(directory).is_relative_to(each) for each in directories):
            if directory not in logged:
                writer.flush()  # it may hold what this process logged before it resumed
                logged[directory] = _Summaries(Path(directory), sizes)
            unseen = [each for each in summary.value if not logged[directory].has(each, int(global_step or 0))]
            if not unseen:
                return
            summary = type(summary)(value=unseen)
        native(writer, summary, global_step, walltime)

    return wrapped(FileWriter, "add_summary", add_summary)  # seam: torch 2.13


_EVENTS = "*tfevents*"


class _Summaries:
    """The summaries in the event files of a directory.

    Args:
        directory: the directory.
        sizes: the sizes of event files when the checkpoint was saved.
    """

    def __init__(self, directory: Path, sizes: Mapping[str, int]) -> None:
        self._before: set[tuple[str, int, bytes]] = set()
        self._behind: Counter[tuple[str, int]] = Counter()
        for file in directory.glob(_EVENTS):
            for position, event in _events(file.read_bytes()):
                is_behind = position >= sizes.get(str(file), 0)
                for value in event.summary.value:
                    if is_behind:
                        self._behind[value.tag, event.step] += 1
                    else:
                        self._before.add((value.tag, event.step, value.SerializeToString()))

    def has(self, value: Any, step: int) -> bool:
        """Return whether a summary is there already; one that is logged once more than it was before is not."""
        if self._behind[value.tag, step]:
            self._behind[value.tag, step] -= 1
            return True
        return (value.tag, step, value.SerializeToString()) in self._before


def _events(content: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the complete events of an event file, each with its position: a length, a checksum, the event, another."""
    from tensorboard.compat.proto.event_pb2 import Event

    position = 0
    while position + 12 <= len(content):
        end = position + 12 + struct.unpack("<Q", content[position : position + 8])[0]
        if end + 4 > len(content):
            return  # cut off by the kill
        yield position, Event.FromString(content[position + 12 : end])
        position = end + 4

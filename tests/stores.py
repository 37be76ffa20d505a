"""What the trackers' local stores hold, and the law that a killed run leaves there the values of an undisturbed one."""

from __future__ import annotations

import json
import shutil
import signal
import struct
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import contract
from launch import is_installed

ENVIRONMENT = {
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "WANDB_PROJECT": "tests",
    "WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL": "0.01",  # by default what a kill takes with it is 15 seconds
    "MLFLOW_TRACKING_URI": "sqlite:///mlflow.db",
    "MLFLOW_EXPERIMENT_NAME": "tests",
}

TIMED = ("runtime", "per_second", "timestamp", "_wandb")


def are_installed() -> bool:
    """Return whether all trackers are installed; without importing them, which takes seconds."""
    return all(map(is_installed, ("wandb", "mlflow", "tensorboard")))


Values = dict[tuple[str, int], list[Any]]
"""Each value that was logged for a name at a step, in order."""


def continue_the_run(
    bench: contract.Bench,
    directory: Path,
    config: contract.Config,
    *kills: contract.Kill,
    trackers: Sequence[str] = ("wandb", "mlflow", "tensorboard"),
) -> None:
    """Each tracker has one run, and in it the values of a run that was not killed: some of them twice.

    Args:
        bench: how to start the job.
        directory: where.
        config: the job.
        kills: at what event of which step each launch is killed. The one after the last runs to the end.
        trackers: what it logs to.
    """
    for name in ("reference", "killed"):
        (directory / name).mkdir()
    if "mlflow" in trackers:
        make_database(directory / "mlflow.db")
        for name in ("reference", "killed"):
            shutil.copy(directory / "mlflow.db", directory / name)
    bench.run(directory / "reference", config, env=ENVIRONMENT).require_success()
    expected = {tracker: READERS[tracker](directory / "reference") for tracker in trackers}
    for kill in kills:
        outcome = bench.run(directory / "killed", {**config, "kill": kill}, env=ENVIRONMENT)
        assert outcome.statuses == (-signal.SIGKILL,), outcome.output
        for tracker in trackers:
            logged = READERS[tracker](directory / "killed")
            assert 0 < len(logged) < len(expected[tracker]), f"{tracker}: nothing was logged before or after the kill"
    bench.run(directory / "killed", config, env=ENVIRONMENT).require_success()
    for tracker in trackers:
        _require_same(READERS[tracker](directory / "killed"), expected[tracker], tracker)
    if "wandb" in trackers:
        assert len(_wandb_runs(directory / "killed")) == len(_wandb_runs(directory / "reference"))


def _require_same(found: Values, expected: Values, tracker: str) -> None:
    """Require the same values of each name at each step, whether or not one is there twice."""
    assert {name: set(values) for name, values in found.items()} == {
        name: set(values) for name, values in expected.items()
    }, tracker


def _is_timed(name: str) -> bool:
    return any(word in name for word in TIMED)


# ---- W&B


def _wandb_runs(directory: Path) -> dict[str, list[dict[str, Any]]]:
    """Read the offline directories, of which each launch has its own, and return the rows of each run.

    A framework may begin a run and leave it without a row, as Accelerate 1.9 to 1.12 do.
    """
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for file in sorted(directory.glob("wandb/offline-run-*/*.wandb")):
        runs[file.name] += _rows(file)
    return runs


def _wandb_values(directory: Path) -> Values:
    logged = {name: rows for name, rows in _wandb_runs(directory).items() if rows}
    assert len(logged) == 1, f"one run became {sorted(logged)}"
    found: Values = defaultdict(list)
    for row in next(iter(logged.values())):
        # Offline, each launch counts its rows from 0, unless it is given a step; frameworks log theirs as a value.
        step = row.pop("_step")
        step = next((row[name] for name in ("train/global_step", "trainer/global_step") if name in row), step)
        for name, value in row.items():
            found[name, step].append(value)
    return dict(found)


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    from wandb.proto.wandb_internal_pb2 import Record

    for document in offline_records(file.read_bytes()):
        record = Record.FromString(document)
        if record.WhichOneof("record_type") == "history":
            items = {each.key or "/".join(each.nested_key): each.value_json for each in record.history.item}
            yield {name: json.loads(value) for name, value in items.items() if not _is_timed(name)}


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


def make_database(file: Path) -> None:
    """Make the tables, which takes MLflow seconds."""
    from mlflow import MlflowClient

    MlflowClient(f"sqlite:///{file}").search_experiments()


def _mlflow_values(directory: Path) -> Values:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{directory}/mlflow.db")
    runs = client.search_runs([each.experiment_id for each in client.search_experiments()])
    assert len(runs) == 1, f"one run became {len(runs)}"
    found: Values = defaultdict(list)
    for name in runs[0].data.metrics:
        for each in client.get_metric_history(runs[0].info.run_id, name):
            if not _is_timed(name):
                found[name, each.step].append(each.value)
    return dict(found)


# ---- TensorBoard


def _tensorboard_values(directory: Path) -> Values:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    found: Values = defaultdict(list)
    runs = set()
    for file in sorted(directory.rglob("*tfevents*")):
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                if not _is_timed(value.tag) and value.metadata.plugin_data.plugin_name == "scalars":
                    found[value.tag, event.step].append(make_ndarray(value.tensor).item())
                    runs.add(file.parent)
    assert len(runs) == 1, f"one run became {runs}"
    return dict(found)


READERS = {"wandb": _wandb_values, "mlflow": _mlflow_values, "tensorboard": _tensorboard_values}

"""What a mirror costs the training, and how fast files go to an object store and back, against obstore alone.

The store is SeaweedFS on this machine where ``weed`` is installed (``nox -s remote`` does), else a local directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks import figure
from benchmarks.figure import Figure
from resume_adapters import KeepLast, Remote
from resume_adapters.core.checkpoint.manifest import FileEntry
from resume_adapters.core.checkpoint.writer import Captured
from resume_adapters.core.ranks import SINGLE_PROCESS
from resume_adapters.core.run.context import RunOptions
from resume_adapters.core.run.run import ResumableRun
from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.core.tiers.object_store import ObjectStore
from resume_adapters.core.tiers.remote import RemoteTier

GOAL_BLOCKED, GOAL_TRANSFER = 0.02, 0.8
MEGABYTES = 512

_KEY, _SECRET = "benchmark", "benchmarksecret"


def measure(rounds: int) -> list[Figure]:
    """Return by how much a mirror blocks the training longer, and the speed of transfers as a ratio to obstore's."""
    with tempfile.TemporaryDirectory() as directory, _store(Path(directory)) as (url, what):
        file = Path(directory) / "file"
        file.write_bytes(os.urandom(MEGABYTES << 20))
        return [_blocked(rounds, Path(directory), url, what), *_transfers(rounds, file, url, what)]


class _Content:
    def __init__(self, content: bytes) -> None:
        self._content = content

    def save(self, directory: Path) -> None:
        (directory / "model.bin").write_bytes(self._content)

    def capture(self) -> Captured:
        return Captured({"step": 1}, {}, {"epoch": 0.0, "reason": "scheduled"})

    def owner_of(self, file: Path) -> int:
        return 0


def _blocked(rounds: int, directory: Path, url: str, what: str) -> Figure:
    """Save with and without a mirror, in turns: the copy of the save before is done, and the store may still write."""
    content = _Content(os.urandom(MEGABYTES << 20))
    bare: list[float] = []
    longer: list[float] = []
    runs = {is_mirrored: _begun(directory, url, is_mirrored=is_mirrored) for is_mirrored in (False, True)}
    for step in range(rounds + 1):
        bare.append(_timed(lambda: content.save(directory)))
        order = sorted(runs, reverse=step % 2 == 0)
        seconds = {is_mirrored: _saved(runs[is_mirrored], step + 1, content) for is_mirrored in order}
        longer.append(seconds[True] - seconds[False])
    for run in runs.values():
        run.close()
        shutil.rmtree(run.directory)
    scale = figure.median(bare)
    return figure.of(
        f"{MEGABYTES} MB save: training blocked longer because of a mirror",
        [each / scale for each in longer[1:]],
        "x",
        GOAL_BLOCKED,
        detail=f"a bare save takes {scale:.2f} s; {what}",
    )


def _begun(directory: Path, url: str, *, is_mirrored: bool) -> ResumableRun:
    mirror = [Remote(f"{url}/blocked", timeout=timedelta(seconds=30))] if is_mirrored else []
    run = ResumableRun(
        directory / f"run-{is_mirrored}", RunOptions(mirror=mirror, keep=KeepLast(1)), ranks=SINGLE_PROCESS
    )
    run.open()
    run.begin(0, 0.0)
    return run


def _saved(run: ResumableRun, step: int, content: _Content) -> float:
    """Save; return how long the training was blocked, once the save is committed and copied."""
    seconds = _timed(lambda: run.saver.save(f"checkpoint-{step}", step, content))
    run.saver.flush()
    while any(state.behind for state in run.context.mirrors.states):
        time.sleep(0.01)
    return seconds


def _transfers(rounds: int, file: Path, url: str, what: str) -> list[Figure]:
    import obstore

    store = ObjectStore(f"{url}/transfers", timedelta(minutes=1))
    size, digest = LocalStorage().digest(file)
    entry = FileEntry(file.name, size, digest)
    tier = RemoteTier(store, LocalStorage(), "a benchmark")
    up: list[float] = []
    down: list[float] = []
    target = file.with_name("target")
    for number in range(rounds):
        keys = f"alone-{number}", f"ours-{number}/{file.name}"
        alone = _timed(lambda key=keys[0]: obstore.put(store._store, key, file))
        up.append(alone / _timed(lambda number=number: tier.copy(f"ours-{number}", file.parent, [entry])))
        alone = _timed(lambda key=keys[0]: _download_alone(store, key, target))
        down.append(alone / _timed(lambda key=keys[1]: _download(store, key, size, target)))
        store.discard(keys)
    detail = f"{MEGABYTES} MB, with digests and written to the disk; {what}"
    return [
        figure.of("upload, against obstore alone", up, "x", GOAL_TRANSFER, at_most=False, detail=detail),
        figure.of("download, against obstore alone", down, "x", GOAL_TRANSFER, at_most=False, detail=detail),
    ]


def _timed(work: Any) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _download_alone(store: ObjectStore, key: str, target: Path) -> None:
    import obstore

    with target.open("wb") as file:
        for piece in obstore.get(store._store, key).stream():
            file.write(piece)


def _download(store: ObjectStore, key: str, size: int, target: Path) -> None:
    import xxhash

    hasher, offset, storage = xxhash.xxh3_128(), 0, LocalStorage()
    storage.write(target, b"")
    for piece in store.get_pieces(key, size):
        storage.write_range(target, offset, piece)
        hasher.update(piece)
        offset += len(piece)


@contextlib.contextmanager
def _store(directory: Path) -> Iterator[tuple[str, str]]:
    """Start a store; yield a URL in it, and what it is. One that is not ready in a minute is not waited for."""
    weed = shutil.which("weed")
    if weed is not None:
        filer, port, *others = _free_ports(8)
        process = _start(weed, directory, filer, port, others)
        try:
            if _has_bucket(filer):
                endpoint = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_REGION": "us-east-1"}
                os.environ.update(endpoint, AWS_ACCESS_KEY_ID=_KEY, AWS_SECRET_ACCESS_KEY=_SECRET)
                yield "s3://bucket", "SeaweedFS on the same machine"
                return
        finally:
            process.kill()
            process.wait()
    yield f"file://{directory}/store-{uuid.uuid4().hex}", "a local directory"


def _start(weed: str, directory: Path, filer: int, port: int, others: list[int]) -> subprocess.Popen[bytes]:
    data, settings = directory / "weed", directory / "s3.json"
    data.mkdir()
    keys = {"accessKey": _KEY, "secretKey": _SECRET}
    identity = {"name": "a", "credentials": [keys], "actions": ["Admin"]}
    settings.write_text(json.dumps({"identities": [identity]}))
    words = ["server", "-ip", "127.0.0.1", "-dir", str(data), "-volume.max", "20", "-filer", "-s3"]
    words += ["-filer.port", str(filer), "-s3.port", str(port), "-s3.config", str(settings)]
    names = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port.grpc", "s3.port.grpc")
    words += [word for name, number in zip(names, others, strict=True) for word in (f"-{name}", str(number))]
    return subprocess.Popen([weed, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _has_bucket(filer: int) -> bool:
    """Make a bucket, which is a directory of the filer; return whether that was possible within a minute."""
    request = urllib.request.Request(f"http://127.0.0.1:{filer}/buckets/bucket/", method="POST")
    end = time.monotonic() + 60.0
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(request, timeout=5.0).close()
            return True
        time.sleep(0.5)
    return False


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in found:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in found]

"""Files on their way to an object store and back: in parts, with their digests on the fly, in bounded memory.

The parts on their way and those being read are at most 256 MB. Small parts begin to go sooner, and cost less: memory of
more than 32 MB is mapped and cleared each time. Small files go in parallel, each as a whole.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import xxhash

from resume_adapters.core.storage.base import Bytes, Storage
from resume_adapters.core.tiers.store import Store
from resume_adapters.core.tiers.tier import LocalFile
from resume_adapters.errors import CheckpointDamaged

Found = TypeVar("Found", bound=Bytes)

PART = 8 << 20
"""Bytes of a part, and of a file that goes as a whole, at most; very large files have larger parts."""

MOST_PARTS = 9000
"""Parts of an object; stores allow 10,000."""

IN_FLIGHT = 128 << 20
"""Bytes of the parts on their way, at most."""

RANGE = 8 << 20
"""Bytes of a large object that are read at a time: a part, as it was written."""

_RANGES_AT_ONCE = 8

_WHOLE_AT_ONCE = 8

THREAD_NAME = "resume-adapters-transfer"
"""How the names of the threads begin that copy."""


def upload(
    store: Store,
    storage: Storage,
    files: Sequence[tuple[str, LocalFile]],
    require_wanted: Callable[[], object] = bool,
) -> None:
    """Copy files to a store.

    Args:
        store: the store.
        storage: where the files are.
        files: each after its key.
        require_wanted: is called before each file and part, and raises where no more is to be copied. The client then
            tells the store to forget the parts of the file that are there.

    Raises:
        CheckpointDamaged: a file is no longer what the manifest says; it is not in the store.
        TierUnavailable: the store does not answer.
    """
    whole = [each for each in files if each[1].entry.bytes <= PART]
    _in_parallel([functools.partial(_upload_whole, store, storage, key, file, require_wanted) for key, file in whole])
    for key, file in files:
        if file.entry.bytes > PART:
            part = part_of(file.entry.bytes)
            store.put_parts(key, _while(require_wanted, _ahead(_content(storage, file, part))), part)


def part_of(size: int) -> int:
    """Return how large the parts of a large file are."""
    return PART * -(-size // (PART * MOST_PARTS))


def _in_parallel(work: Sequence[Callable[[], object]]) -> None:
    """Call functions on a few threads, and raise the first error, once none of them is under way.

    The threads are daemons. An interpreter that exits waits for those of an executor, and the store may hang.
    """
    due, errors = iter(list(work)), list[BaseException]()

    def run() -> None:
        for each in due:
            try:
                each()
            except BaseException as error:  # of any kind: it is raised in the thread that waits
                errors.append(error)
            if errors:
                return

    begun = []
    try:
        for number in range(min(_WHOLE_AT_ONCE, len(work))):
            thread = threading.Thread(target=run, name=f"{THREAD_NAME}_{number}", daemon=True)
            thread.start()
            begun.append(thread)
    except RuntimeError as error:  # the machine has no more
        errors.append(error)
    for thread in begun:
        thread.join()
    if errors:
        raise errors[0]


def _upload_whole(
    store: Store, storage: Storage, key: str, file: LocalFile, require_wanted: Callable[[], object]
) -> None:
    require_wanted()
    content = b"".join(_content(storage, file, max(file.entry.bytes, 1)))
    store.put(key, content)


def _while(require_wanted: Callable[[], object], pieces: Iterator[bytes]) -> Iterator[bytes]:
    for piece in pieces:
        require_wanted()
        yield piece


def _ahead(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield pieces, while the next one is being read."""
    with ThreadPoolExecutor(1, thread_name_prefix=THREAD_NAME) as pool:
        following = pool.submit(next, pieces, None)
        while (piece := following.result()) is not None:
            following = pool.submit(next, pieces, None)
            yield piece


def _content(storage: Storage, file: LocalFile, count: int) -> Iterator[bytes]:
    """Yield the content of a file in pieces, the last one after the digest of all was compared.

    Raises:
        CheckpointDamaged: it is not what the manifest says.
    """
    hasher, offset, size = xxhash.xxh3_128(), 0, file.entry.bytes
    while True:
        piece = _read(storage, file, offset, count)
        hasher.update(piece)
        offset += len(piece)
        is_last = offset >= size
        if len(piece) < min(count, size - offset + len(piece)) or (is_last and hasher.hexdigest() != file.entry.digest):
            raise CheckpointDamaged(
                f"{file.entry.path} is no longer what its manifest says: it is not copied", path=file.path
            )
        yield piece
        if is_last:
            return


def _read(storage: Storage, file: LocalFile, offset: int, count: int) -> bytes:
    try:
        return storage.read_range(file.path, offset, count)
    except OSError as error:
        raise CheckpointDamaged(
            f"{file.entry.path} cannot be read ({error.strerror}): it is not copied", path=file.path
        ) from error


def download(store: Store, key: str, size: int) -> Iterator[Bytes]:
    """Yield the content of an object of a known size, in order; its parts are read in parallel.

    Raises:
        CheckpointDamaged: the object is not there, or is shorter.
        TierUnavailable: the store does not answer.
    """
    if size <= RANGE:
        yield _read_whole(store, key, size)
        return
    ranges = iter([(begin, min(begin + RANGE, size)) for begin in range(0, size, RANGE)])
    with ThreadPoolExecutor(_RANGES_AT_ONCE, thread_name_prefix=THREAD_NAME) as pool:
        under_way: deque[Future[Bytes]] = deque()

        def begin_next() -> None:
            for begin, end in ranges:
                under_way.append(pool.submit(_read_range, store, key, begin, end))
                return

        for _ in range(_RANGES_AT_ONCE):
            begin_next()
        while under_way:
            piece = under_way.popleft().result()
            begin_next()
            yield piece


def _read_whole(store: Store, key: str, size: int) -> bytes:
    """Read a small object without a range: some stores answer one that covers everything with the wrong status."""
    found = _or_damaged(key, lambda: store.get(key))
    if len(found) != size:
        found = _or_damaged(key, lambda: store.get(key))
    if len(found) != size:
        raise CheckpointDamaged(f"{key} has {len(found)} bytes, its manifest says {size}")
    return found


def _read_range(store: Store, key: str, begin: int, end: int) -> Bytes:
    """Read a range; what a proxy has cut off is asked for again."""
    found = _or_damaged(key, lambda: store.get_range(key, begin, end))
    if len(found) < end - begin:
        found = _or_damaged(key, lambda: store.get_range(key, begin, end))
    if len(found) != end - begin:
        raise CheckpointDamaged(f"{key} has {len(found)} bytes from {begin} on, its manifest says {end - begin}")
    return found


def _or_damaged(key: str, read: Callable[[], Found]) -> Found:
    try:
        return read()
    except FileNotFoundError:
        raise CheckpointDamaged(f"{key} is missing") from None

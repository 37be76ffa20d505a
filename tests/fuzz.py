"""Damage of every kind, done to copies of a run directory in this process.

Whatever is mutated, a start takes a checkpoint whose files are exactly those that were committed, or raises a
:class:`ResumeError`: never another exception, never code of the checkpoint's choice, never a file that no manifest
names. Nothing outside of the run directory changes, nothing in it is lost that was not on its way to be a checkpoint,
and no start takes long or needs much memory.

Each mutation follows from its seed. ``RESUME_ADAPTERS_FUZZ`` is the number of seeds (300 by default, of which the usual
run takes the first hundred), and ``RESUME_ADAPTERS_FUZZ_SEED`` the only one to replay.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash

from resume_adapters.core.checkpoint import distributed_metadata
from resume_adapters.core.checkpoint.checkpoint import Checkpoint
from resume_adapters.core.checkpoint.files import CheckpointFiles
from resume_adapters.core.checkpoint.layout import CheckpointState, locate, state_of
from resume_adapters.core.checkpoint.manifest import describe_cursor
from resume_adapters.core.checkpoint.validity import ForeignDetector
from resume_adapters.core.ranks import SingleProcess
from resume_adapters.core.run.context import RunOptions
from resume_adapters.core.run.run import ResumableRun
from resume_adapters.core.session.context import RestoreContext
from resume_adapters.core.session.messages import log_wasted
from resume_adapters.core.session.records import RankState
from resume_adapters.core.storage.base import is_temporary
from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.errors import ResumeError, RunDirectoryUnusable

import forgeries

STORED = Path(__file__).parent / "stored"
STORAGE = LocalStorage()

_LARGEST = 1 << 22
"""Bytes of a file that a mutation reads: others have made some as large as disks."""


class Code:
    """A pickle of it makes a directory where it is loaded freely."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


class Damage:
    """One mutated copy of a run directory.

    Args:
        directory: the copy.
        seed: what the mutations follow from.

    Attributes:
        marker: the directory that code from a checkpoint would make.
        is_forged: the manifests were made to agree with the mutated files.
        done: what was done, for the message.
    """

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory = directory
        self.marker = directory.parent / "code-ran"
        self.victims = directory.parent / "victims"
        self.is_forged = False
        self.done: list[str] = []
        self._random = random.Random(seed)
        for _ in range(self._random.choice([1, 1, 1, 2, 3])):
            mutate = self._random.choice(MUTATIONS)
            files = self._files()
            if not files:
                break  # the one before took all that there was
            path = self._random.choice(files)
            self.done.append(f"{mutate.__name__.lstrip('_')} {path.relative_to(directory)}")
            mutate(self, path)

    def _files(self) -> list[Path]:
        found = (path for path in self.directory.rglob("*") if path.is_file() and not path.is_symlink())
        return sorted(path for path in found if path.stat().st_size <= _LARGEST)

    def _manifests(self) -> list[Path]:
        return [path for path in self._files() if path.name == "manifest.json"]

    # ---- Of one file

    def _flip(self, path: Path) -> None:
        content = bytearray(path.read_bytes() or b"\0")
        content[self._random.randrange(len(content))] ^= 1 << self._random.randrange(8)
        path.write_bytes(content)

    def _cut(self, path: Path) -> None:
        os.truncate(path, self._random.randrange(path.stat().st_size + 1))

    def _grow(self, path: Path) -> None:
        with path.open("ab") as file:
            file.write(self._random.randbytes(self._random.choice([1, 100])))

    def _make_sparse(self, path: Path) -> None:
        os.truncate(path, 1 << 40)

    def _remove(self, path: Path) -> None:
        path.unlink()

    def _replace(self, path: Path) -> None:
        path.unlink()
        kind = self._random.choice(["directory", "pipe", "/dev/zero", "/", "gone", path.name])
        if kind == "directory":
            path.mkdir()
        elif kind == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to(kind)

    def _swap(self, path: Path) -> None:
        other = self._random.choice(self._files())
        content = path.read_bytes()
        path.write_bytes(other.read_bytes())
        other.write_bytes(content)

    def _poison(self, path: Path) -> None:
        path.write_bytes(pickle.dumps(Code(self.marker)))

    # ---- Beside the files

    def _add(self, path: Path) -> None:
        names = ["model.safetensors", "optimizer.bin", "scaler.pt", "adapter_model.bin", "pytorch_model.bin"]
        names += [
            "ema.rank-00000.json",
            "rank-00001.json",
            "odd\udcff",
            "x.ckpt",
            ".hidden",
            "mp_rank_01_model_states.pt",
        ]
        added = path.parent / self._random.choice(names)
        if not os.path.lexists(added):
            added.write_bytes(self._random.choice([b"", b"{}", pickle.dumps(Code(self.marker))]))

    def _link(self, path: Path) -> None:
        link = self.directory / self._random.choice(
            ["x.ckpt", "checkpoint-99", "checkpoint_99", "global_step99", "\udcff"]
        )
        if not os.path.lexists(link):
            link.symlink_to(self._random.choice(["/", "/dev/zero", ".", "..", link.name, "a" * 255, str(path)]))

    def _copy(self, path: Path) -> None:
        top = self.directory / path.relative_to(self.directory).parts[0]
        to = top.with_name(self._random.choice(["best_0.93", "checkpoint-9000", "checkpoint_9000", "a" * 250]))
        if top.is_dir() and not top.name.startswith(".") and not os.path.lexists(to):
            with contextlib.suppress(shutil.Error):  # it copies no pipes
                shutil.copytree(top, to, symlinks=True, ignore=_large)

    def _lose(self, path: Path) -> None:
        """Remove the directory of a file: this package's, or the whole checkpoint."""
        if path.parent != self.directory:
            shutil.rmtree(path.parent)

    def _mislead(self, path: Path) -> None:
        """Put a link, or a directory, where a start writes, moves or removes."""
        name = self._random.choice(
            [
                *(".resume", ".resume/journal.jsonl", ".resume/generation", ".resume/status.json", ".resume/stop"),
                *(".resume/set-aside", ".resume/remove-0-x", ".resume/begin-0-x", ".resume/identity", "latest"),
                *(".resume/set-aside/checkpoint-15.1", "checkpoint-99", "x.ckpt", "x.ckpt.resume", "x.superseded"),
                *("checkpoint-99/resume", f"{path.parent.relative_to(self.directory)}", "global_step99/resume"),
            ]
        )
        place = self.directory / name
        if os.path.lexists(place) and self._random.random() < 0.5:
            return
        if place.is_dir() and not place.is_symlink():
            if place == self.directory:
                return
            shutil.rmtree(place)
        place.unlink(missing_ok=True)
        target = self._random.choice(["train.py", "run", "run/.resume", "run/.resume/journal.jsonl", ".", "absent"])
        with contextlib.suppress(OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
            if self._random.random() < 0.2:
                place.mkdir()
            else:
                place.symlink_to(self._random.choice([self.victims / target, Path("..", "victims", target)]))

    def _rename(self, path: Path) -> None:
        """Give a checkpoint, or a part of it, an absurd name."""
        top = self.directory / path.relative_to(self.directory).parts[0]
        name = self._random.choice([*forgeries.NAMES, f"{top.name}.superseded", f"{top.name}.resume", "checkpoint-1"])
        with contextlib.suppress(OSError, ValueError):
            if "/" not in name and not os.path.lexists(top.with_name(name)):
                top.rename(top.with_name(name))

    # ---- With manifests that agree

    def _forge_value(self, path: Path) -> None:
        """Let a document hold an absurd value, in a valid encoding."""
        known = [(each, kind) for each in self._files() if (kind := self._kind_of(each)) is not None]
        if not known:
            return
        kind = self._random.choice(sorted({id(kind): kind for _, kind in known}.values(), key=forgeries.KINDS.index))
        document = self._random.choice([each for each, its in known if its is kind])
        try:
            content, place = forgeries.forged(document.read_bytes(), kind, self._random, self.victims)
        except Exception:  # the mutation before has left none of that kind, or it cannot be written
            return
        self.done[-1] += f" ({document.relative_to(self.directory)} at {place!r})"
        document.write_bytes(content)
        if document.parent.name != ".resume":
            self.is_forged = True
            if document.name != "manifest.json":
                self._agree()

    def _kind_of(self, file: Path) -> forgeries.Kind | None:
        return forgeries.kind_of(file.relative_to(self.directory))

    def _add_shards(self, path: Path) -> None:
        """Let a checkpoint that is a directory have shards whose index names absurd files."""
        checkpoints = [each.parents[1] for each in self._manifests() if each.parent.name == "resume"]
        if checkpoints:
            self.is_forged = True
            checkpoint = self._random.choice(checkpoints)
            added = forgeries.sharded(checkpoint / "shards", self._random, self.victims)
            self._agree({f"shards/{name}" for name in added})

    def _forge(self, path: Path) -> None:
        """Change a node of a JSON document, a manifest or another, and let the manifests agree with it."""
        self.is_forged = True
        documents = [each for each in self._files() if each.suffix == ".json"]
        document = self._random.choice(documents) if documents else path
        try:
            content = json.loads(document.read_bytes())
        except (ValueError, RecursionError):
            return
        content = self._change(content)
        text = json.dumps(content).replace('"DEEP"', "[" * 50_000 + "]" * 50_000)
        if document.name == "manifest.json" and isinstance(content, dict) and "manifest" in content:
            text = _envelope(text_of=json.dumps(content["manifest"]).replace('"DEEP"', "[" * 50_000 + "]" * 50_000))
        document.write_text(text)
        self._agree()

    def _forge_bytes(self, path: Path) -> None:
        """Damage a file, and let the manifests agree with it."""
        self.is_forged = True
        self._random.choice([Damage._flip, Damage._cut, Damage._poison])(self, path)
        self._agree()

    def _change(self, node: Any) -> Any:
        inner = list(node) if isinstance(node, dict) else list(range(len(node))) if isinstance(node, list) else []
        if inner and self._random.random() < 0.8:
            key = self._random.choice(inner)
            if self._random.random() < 0.15:
                del node[key]
            else:
                node[key] = self._change(node[key])
            return node
        odd = [None, True, -1, 0, 1 << 70, 10**9, 1.5, "", "x", "../../x", "/etc/passwd", [], {}, [[]], "DEEP"]
        odd += [{"$": kind, "of": [1]} for kind in ("tensor", "dict", "array", "dtype", "none", "complex", "set")]
        return self._random.choice([*odd, {"$": ["x"]}, {"$": "tensor", "key": "x"}, {"$": "int", "of": "9" * 5000}])

    def _agree(self, added: Collection[str] = ()) -> None:
        """Let the manifests agree with the files, and name those that were added."""
        for manifest in self._manifests():
            try:
                envelope = json.loads(manifest.read_bytes())
                files = envelope["manifest"]["files"]
                files += [{"path": name} for name in added if (manifest.parents[1] / name).is_file()]
                sidecar = manifest.parent
                checkpoint = (
                    sidecar.with_name(sidecar.name.removesuffix(".resume"))
                    if sidecar.name != "resume"
                    else (sidecar.parent)
                )
                for entry in files:
                    if STORAGE.size(locate(STORAGE, checkpoint, entry["path"])) > _LARGEST:
                        continue
                    size, digest = STORAGE.digest(locate(STORAGE, checkpoint, entry["path"]))
                    entry.update(bytes=size, digest=digest)
                manifest.write_text(_envelope(text_of=json.dumps(envelope["manifest"])))
            except (OSError, ValueError, KeyError, TypeError, RecursionError, AttributeError):
                continue


def _large(directory: str, names: list[str]) -> list[str]:
    """Return the names of what is too large to copy."""
    paths = [Path(directory, name) for name in names]
    return [path.name for path in paths if path.is_file() and path.stat().st_size > _LARGEST]


def _envelope(text_of: str) -> str:
    digest = xxhash.xxh3_128_hexdigest(text_of.encode())
    return f'{{"digest":"{digest}","manifest":{text_of}}}'


MUTATIONS: list[Callable[[Damage, Path], None]] = [
    *(Damage._flip, Damage._cut, Damage._grow, Damage._make_sparse, Damage._remove, Damage._replace, Damage._swap),
    *(Damage._poison, Damage._add, Damage._link, Damage._copy, Damage._lose),
    *(Damage._forge, Damage._forge, Damage._forge, Damage._forge_bytes, Damage._mislead, Damage._rename),
    *([Damage._forge_value] * 16),
    Damage._add_shards,
]


def _seeds() -> list[Any]:
    """Return the seeds as parameters: those of the usual run, and the further ones."""
    one = os.environ.get("RESUME_ADAPTERS_FUZZ_SEED")
    if one:
        return [pytest.param([int(one)], id=one)]
    few, count = 40, int(os.environ.get("RESUME_ADAPTERS_FUZZ", "300"))
    return [
        pytest.param(range(few), id="few"),
        pytest.param(range(few, max(count, 2 * few)), marks=[pytest.mark.thorough, pytest.mark.long], id="further"),
    ]


SEEDS = _seeds()


def survives_every_damage(
    tmp_path: Path,
    run_directory: str,
    foreign: ForeignDetector,
    kind: type[RankState],
    load: Callable[[CheckpointFiles], object],
    seeds: Sequence[int],
) -> None:
    """Mutate copies of a stored run directory, and start each.

    Args:
        tmp_path: where to.
        run_directory: below ``tests/stored``.
        foreign: the adapter's detector of checkpoints of the bare framework.
        kind: the record of a rank's state.
        load: reads the framework's own files as the adapter does.
        seeds: what the mutations follow from.
    """
    committed = _contents(STORED / run_directory)
    surroundings = Surroundings(tmp_path, STORED / run_directory)
    outcomes: Counter[str] = Counter()
    for seed in seeds:
        directory = tmp_path / "run"
        shutil.copytree(STORED / run_directory, directory, symlinks=True)
        damage = Damage(directory, seed)
        words = in_words(seed, damage.done)
        surroundings.add_strangers(directory)
        with surroundings.unharmed(directory, words):
            outcomes[outcome_of(words, lambda: _start(directory, foreign, kind, load, damage, committed))] += 1  # noqa: B023
        shutil.rmtree(directory)
    print(f"{run_directory}: seeds {seeds[0]} to {seeds[-1]}, outcomes {dict(outcomes)}")
    assert len(seeds) == 1 or outcomes.keys() >= {"resumed", "NoValidCheckpoint"}, outcomes


def in_words(seed: int, done: Sequence[str]) -> str:
    """Return what was done by which seed, for a message."""
    return f"RESUME_ADAPTERS_FUZZ_SEED={seed}: {'; '.join(done)}".encode("utf-8", "backslashreplace").decode()


def outcome_of(words: str, start: Callable[[], str]) -> str:
    """Return what a start has ended in: what it returns, or the name of a :class:`ResumeError`.

    Args:
        words: what was done before, for the message.
        start: starts, and reads what it resumes from.
    """
    try:
        return start()
    except ResumeError as error:
        # A start that cannot use its directory says so of any error; here the system must be its cause.
        system = not isinstance(error, RunDirectoryUnusable) or isinstance(error.__cause__, OSError | None)
        assert system, f"{words} ended in {error.__cause__!r}"
        return type(error).__name__
    except BaseException as error:
        raise AssertionError(f"{words} ended in {type(error).__name__}") from error


class TooLong(BaseException):
    """A start has taken longer than any may."""


_LONGEST, _MOST = 30, 256 << 20
"""Seconds that a start takes at most, and bytes that it needs beside the largest file."""


class Surroundings:
    """What is beside a run directory, and in it without being the run's.

    Args:
        directory: where the run directory will be.
        other: what another run directory is made of.
        store: what the run may write to, beside its directory.
    """

    def __init__(self, directory: Path, other: Path, store: Path | None = None) -> None:
        self._directory, self._store = directory, store
        victims = directory / "victims"
        shutil.copytree(other, victims / "run", symlinks=True)
        (victims / "train.py").write_text("print('training')\n")
        self._before = self._outside(directory / "run")

    def add_strangers(self, directory: Path) -> None:
        """Put files into a run directory that are not the run's."""
        for name in ("train.py", "notes/a.txt", "notes/resume/cv.pdf", "checkpoint-of-mine/model.bin", "mine.ckpt.bak"):
            place = directory / name
            with contextlib.suppress(OSError):  # what was done to the run directory has the name
                place.parent.mkdir(parents=True, exist_ok=True)
                if not os.path.lexists(place):
                    place.write_bytes(name.encode())

    def _outside(self, run_directory: Path) -> dict[str, str]:
        """Return all that is not below the run directory, with its content."""
        found = {}
        for path in sorted(self._directory.rglob("*")):
            if not {run_directory, self._store} & {path, *path.parents}:
                what = os.readlink(path) if path.is_symlink() else "" if path.is_dir() else STORAGE.digest(path)[1]
                found[str(path)] = what
        return found

    @contextlib.contextmanager
    def unharmed(self, run_directory: Path, words: str) -> Iterator[None]:
        """Return the context of a start that must leave all this alone, and be quick and small."""
        held = _held(run_directory)
        largest = max((path.stat().st_size for path in _regular(run_directory)), default=0)
        before = restart_peak()
        former = signal.signal(signal.SIGALRM, _too_long)
        signal.alarm(_LONGEST)
        try:
            yield
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, former)
        grown = memory("VmHWM") - before
        assert grown < _MOST + min(largest, 1 << 34), f"{words}: {grown >> 20} MB were needed"
        changed = set(self._before.items()) ^ set(self._outside(run_directory).items())
        assert not changed, f"{words} changed what is outside: {sorted(changed)}"
        lost = held.keys() - _held(run_directory, also_pending=True).keys()
        assert not lost, f"{words} lost {[held[each] for each in lost]}"


def _too_long(*_: object) -> None:
    raise TooLong


def restart_peak() -> int:
    """Begin to measure how much memory this process needs at most; return how much it has now."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def _regular(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file() and not path.is_symlink()]


def _held(directory: Path, *, also_pending: bool = False) -> dict[str, str]:
    """Return the files of a run directory that no start may lose, by their content."""
    found = {}
    for path in _regular(directory):
        place = path.relative_to(directory)
        is_own = place.parts[0] == ".resume" and place.parts[1:2] != ("set-aside",)
        is_pending = not also_pending and state_of(STORAGE, directory / place.parts[0]) is CheckpointState.PENDING
        if is_own or is_pending or is_temporary(path.name) or place.parts == ("latest",):
            continue
        size = path.stat().st_size
        found[str(size) if size > _LARGEST else STORAGE.digest(path)[1]] = str(place)
    return found


def _contents(directory: Path) -> set[str]:
    return {STORAGE.digest(path)[1] for path in directory.rglob("*") if path.is_file()}


def _start(
    directory: Path,
    foreign: ForeignDetector,
    kind: type[RankState],
    load: Callable[[CheckpointFiles], object],
    damage: Damage,
    committed: set[str],
) -> str:
    run = ResumableRun(directory, RunOptions(foreign=foreign), ranks=SingleProcess())

    def context(checkpoint: Checkpoint) -> RestoreContext:
        return RestoreContext(run, checkpoint, kind, verify=True, rescale=cast("Any", None))

    try:
        chosen = run.open(lambda checkpoint: context(checkpoint).require_parts()).checkpoint
        log_wasted(run.wasted)
        if chosen is None or chosen.manifest is None:
            names = " ".join(damage.done)
            words = ("journal", ".resume", "lose", "remove", "replace", "mislead", "rename")
            lost = any(word in names for word in words)
            assert lost or damage.is_forged, "what was committed was neither found nor missed"
            return "fresh" if chosen is None else "foreign"
        files = run.reader(chosen).files
        if not damage.is_forged:
            read = {STORAGE.digest(files.require(entry.path))[1] for entry in chosen.manifest.files}
            assert read <= committed, "a file is not what was committed"
        describe_cursor(chosen.manifest.cursor)
        context(chosen).all_rank_states()
        with distributed_metadata.reading(files):
            if files.find("shards/.metadata") is not None:
                shards = files.require("shards/.metadata").parent
                dcp.load({"weight": torch.zeros(6)}, checkpoint_id=shards, no_dist=True)
        load(files)
        return "resumed"
    finally:
        run.close()

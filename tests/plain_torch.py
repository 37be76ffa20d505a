"""A training script of plain torch: the loop of the core alone, with no framework around it.

What an adapter is to the loop, :class:`PlainTorch` is; what a process is, :class:`Launch` is, so that a test can leave
the script at any batch and launch it again within its own process.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, Subset

from resume_adapters.core.checkpoint.manifest import PartEntry
from resume_adapters.core.checkpoint.native_files import read_native
from resume_adapters.core.checkpoint.validity import ForeignStep
from resume_adapters.core.dataloader.progress import batch_size
from resume_adapters.core.loop import observed
from resume_adapters.core.loop.framework import LoopFramework, Resumed
from resume_adapters.core.loop.guard import Trained
from resume_adapters.core.loop.loader import LoopLoader
from resume_adapters.core.loop.loop import ResumableLoop
from resume_adapters.core.observed.walk import Subjects
from resume_adapters.core.ranks import current_ranks
from resume_adapters.core.run.run import ResumableRun
from resume_adapters.core.session import finished
from resume_adapters.core.session.context import RestoreContext
from resume_adapters.core.session.framework import CheckpointFacts, FrameworkFacts
from resume_adapters.core.session.new_run import new_run
from resume_adapters.core.session.options import ResumeOptions
from resume_adapters.core.session.records import RankState
from resume_adapters.core.session.rescale import Rescale
from resume_adapters.core.session.session import Session
from resume_adapters.core.session.settings import LaunchSettings, read_settings
from resume_adapters.core.state.records import Record
from resume_adapters.core.state.stateful import ModuleBuffers, Stateful
from resume_adapters.data import ElasticSampler

from miniature import Foreign

WEIGHTS = "weights.pt"


class Killed(BaseException):
    """The process died here."""


class NoTrackers:
    """Of a training that logs nothing."""

    is_closed = False

    def capture(self) -> dict[str, Any]:
        return {}

    def restore(self, saved: dict[str, Any]) -> None: ...

    def close(self) -> None:
        self.is_closed = True


@dataclass
class PlainRankState(Record):
    held: int


def _foreign_step(path: Path) -> ForeignStep | None:
    return ForeignStep(int(path.name.rpartition("-")[2])) if (path / WEIGHTS).exists() else None


class PlainTorch(LoopFramework):
    """A model that is trained by hand: what an adapter is to the loop."""

    rank_state_type = PlainRankState

    def __init__(self, accumulation: int, ranks: int, **given: Any) -> None:
        self.ranks = ranks
        self.given = given
        self.model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        self.wrapped = DistributedDataParallel(self.model) if ranks > 1 else self.model
        for layer in given.get("frozen", ()):
            self.model[layer].requires_grad_(False)
        trained = [each for each in self.model.parameters() if each.requires_grad or not given.get("only_trained")]
        kind = given.get("optimizer", torch.optim.SGD)
        self.optimizer = kind(trained, lr=given.get("lr", 0.05), momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.accumulation = accumulation
        fixed = given.get("invariants", {})
        self.about = FrameworkFacts("", "", "plain", "", accumulation=accumulation, invariants=fixed)
        self.trackers = NoTrackers()
        self.spread_state: Callable[[PlainTorch], Mapping[str, Any]] | None = None
        self.skipped_passes = 0
        self.is_closed = False
        self.foreign = Foreign(_foreign_step)
        self._held = 0
        self._stepped = False

    def train(self, batch: torch.Tensor) -> torch.Tensor:
        """Train on a batch, with dropout."""
        values = batch.float().reshape(-1, 1)
        loss = torch.nn.functional.dropout(self.wrapped(values) - values, 0.2).square().mean()
        (loss / self.accumulation).backward()
        self._held += 1
        self._stepped = self._held == self.accumulation
        if self._stepped:
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            self._held = 0
        return loss

    def trained(self) -> Trained:
        return Trained([self.optimizer], [self.model])

    def state_dict(self) -> dict[str, Any]:
        return self.model.state_dict()

    def track(self, loader: Any, session: Session) -> LoopLoader:
        beneath = loader.beneath if isinstance(loader, Ahead) else loader
        samples = (batch_size(beneath) or 0) * self.ranks
        return LoopLoader(loader, session.loaders.track(beneath), samples, looks_ahead=loader is not beneath)

    def is_accumulating(self) -> bool:
        return self._held > 0

    def skip_micro_batches(self, batches: int) -> None:
        self._held += batches

    def has_stepped(self) -> bool:
        return self._stepped

    def checkpoint_name(self, step: int) -> str:
        return f"checkpoint-{step}"

    def save(self, directory: Path) -> None:
        state = {"optimizer": self.optimizer.state_dict(), "schedule": self.schedule.state_dict()}
        if self.ranks == 1 or dist.get_rank() == 0:
            torch.save({"model": self.model.state_dict(), **state}, directory / WEIGHTS)

    def loaded_files(self, directory: Path) -> list[Path]:
        return [directory / WEIGHTS] if (directory / WEIGHTS).is_file() else []

    def load(self, context: RestoreContext) -> None:
        saved = read_native(context.files.require(WEIGHTS))
        context.load_weights(self.model, saved["model"])
        context.rescale.schedules.remember(self.schedule)
        self.optimizer.load_state_dict(saved["optimizer"])
        self.schedule.load_state_dict(saved["schedule"])
        if self.sharded_state():
            context.add_proof(lambda: context.verify_shards(self.sharded_state), is_shared=True)

    def owner_of(self, file: Path) -> int:
        return 0

    def rank_state(self) -> PlainRankState:
        return PlainRankState(self._held)

    def load_rank_state(self, record: PlainRankState) -> None:
        self._held = record.held

    def load_foreign(self, context: RestoreContext) -> Resumed:
        return Resumed(context.step // 6, context.step, context.step % 6)

    def sharded_state(self) -> Mapping[str, Any]:
        return super().sharded_state() if self.spread_state is None else self.spread_state(self)

    def modules(self) -> list[Any]:
        return [*super().modules(), self.wrapped]

    def parts(self) -> dict[str, Stateful]:
        return {**super().parts(), "buffers": ModuleBuffers({0: self.model})}

    def passes_begun(self, loader: Any) -> int | None:
        return loader.begun if isinstance(loader, Ahead) else super().passes_begun(loader)

    def restore_passes(self, loader: Any, begun: int) -> None:
        super().restore_passes(loader, begun)
        loader.begun = begun

    def skip_pass(self, loader: Any, *, is_left: bool = False, is_iterated: bool = False) -> None:
        self.skipped_passes += not is_left
        if isinstance(loader, Ahead):
            loader.begun += not is_iterated
        super().skip_pass(loader, is_left=is_left, is_iterated=is_iterated)

    def subjects(self) -> Subjects:
        return observed.subjects([self.model], [self.optimizer], [self.optimizer, self.schedule, *self.model.buffers()])

    def settings(self) -> LaunchSettings:
        given = {"clip": self.given.get("clip", 1.0), "loader": self}
        return read_settings(given, [self.optimizer], [self.schedule], [self.model])

    def describe(self) -> list[PartEntry]:
        return [PartEntry("model", "framework", "torch.save")]

    def close(self) -> None:
        self.is_closed = True


@dataclass
class StillState(RankState):
    rank: int


class Still(PlainTorch):
    """A model that nobody trains, and where its training is: for tests of a session alone.

    Args:
        sharded: returns the state that is sharded over the ranks.
    """

    def __init__(self, rank: int = 0, sharded: Callable[[], Mapping[str, Any]] = dict) -> None:
        super().__init__(accumulation=1, ranks=1)
        self.rank, self.sharded = rank, sharded

    def session(self, run: ResumableRun, *, verify: bool = True) -> Session:
        """Return a session that has chosen what it resumes from."""
        session = Session(run, self, ResumeOptions(verify=verify), StillState, Rescale("refuse", 1))
        session.open()
        return session

    def sharded_state(self) -> Mapping[str, Any]:
        return self.sharded()

    def save(self, directory: Path) -> None:
        (directory / "file").write_text("x")

    def rank_state(self) -> Any:
        return StillState(self.rank)

    def parts(self) -> dict[str, Stateful]:
        return {}

    def facts(self) -> CheckpointFacts:
        return CheckpointFacts(0.0)


class Ahead:
    """What a loop iterates over where its framework fetches a batch ahead, to know the last one."""

    def __init__(self, beneath: DataLoader[Any]) -> None:
        self.beneath = beneath
        self.begun = 0

    def __len__(self) -> int:
        return len(self.beneath)

    def __iter__(self) -> Iterator[Any]:
        self.begun += 1
        batches = iter(self.beneath)
        batch = next(batches, None)
        while batch is not None:
            following = next(batches, None)
            yield batch
            batch = following


class Counting(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(22))


class Launch:
    """One launch of a training script.

    Args:
        die: is asked after every batch with this launch, and may raise.
        options: of the script, the loop and the run.
    """

    def __init__(self, directory: Path, die: Callable[[Launch], None] = lambda launch: None, **options: Any) -> None:
        torch.manual_seed(options.get("seed", 7))
        random.seed(7)
        finished._FINISHED.clear()  # a process of its own would have finished nothing
        self.options = {"epochs": 3, "max_steps": None, "save_every": 4, "accumulation": 1, "batch": 4, **options}
        self.ranks = current_ranks()
        self.framework = PlainTorch(
            self.options["accumulation"], self.ranks.world_size, **self.options.get("given", {})
        )
        self.framework.spread_state = self.options.get("spread")
        known = {each.name for each in fields(ResumeOptions)}
        options = ResumeOptions(**{name: value for name, value in self.options.items() if name in known})
        self.run = new_run(directory, self.framework, options, ranks=self.ranks, storage=self.options.get("storage"))
        self.loop = ResumableLoop(self.framework, self.run, options, each_epoch=self.options.get("each_epoch", False))
        self.trace: list[Any] = []
        self.end: list[Any] = []
        """What must be as if the script had never been left."""
        self.die = die

    def loader(self) -> Any:
        kind, batch = self.options.get("data", "shuffled"), self.options["batch"]
        if kind == "elastic":
            of_rank = {"rank": self.ranks.rank, "world_size": self.ranks.world_size}
            return DataLoader(range(24), batch, sampler=ElasticSampler(24, seed=1, **of_rank))
        if kind == "stream":
            return DataLoader(Counting(), batch)
        dataset = self.options.get("dataset", range(22))
        workers = self.options.get("workers", {})
        shuffled = DataLoader(dataset, batch, **{"shuffle": True, **workers})
        return Ahead(shuffled) if kind == "ahead" else shuffled

    def __call__(self) -> Launch:
        scripts = {
            "zip": self._zip,
            "two": self._two,
            "followed": self._followed,
            "drawn": self._drawn,
            "anew": self._anew,
            "resampled": self._resampled,
            "in turn": self._in_turn,
            "twice": self._twice,
            "evaluated": self._evaluated,
            "in phases": self._in_phases,
            "annealed": self._annealed,
            "by hand": self._by_hand,
            "initialized": self._initialized,
        }
        script = scripts.get(self.options.get("script", ""))
        data = self.loader()
        with self.loop:
            (script or self._plain)(data)
        weights = {name: tensor.tolist() for name, tensor in self.framework.model.state_dict().items()}
        counts = [self.loop.global_step, self.loop.epoch, self.framework.schedule.last_epoch]
        counts.append(self.framework.passes_begun(data))
        self.end = [weights, counts, torch.rand(2).tolist()]
        return self

    def _epochs(self) -> Iterator[int]:
        return self.loop.epochs(self.options["epochs"], max_steps=self.options["max_steps"])

    def _plain(self, data: Any) -> None:
        for _ in self._epochs():
            for batch in self.loop.batches(data):
                self._step(batch)

    def _zip(self, data: Any) -> None:
        other = DataLoader(range(30), 5, shuffle=True)
        for _ in self._epochs():
            for one, two in zip(self.loop.batches(data), self.loop.batches(other), strict=False):
                self._step(torch.cat([one, two]))

    def _two(self, data: Any) -> None:
        other = DataLoader(range(10), 5, shuffle=True)
        for _ in self._epochs():
            for batch in itertools.chain(self.loop.batches(data), self.loop.batches(other)):
                self._step(batch)

    def _anew(self, data: Any) -> None:
        """Make a loader in each epoch, of more data each time, as a curriculum does."""
        for epoch in self._epochs():
            generator = torch.Generator().manual_seed(epoch)
            for batch in self.loop.batches(DataLoader(range(20 + 4 * epoch), 4, shuffle=True, generator=generator)):
                self._step(batch)

    def _resampled(self, data: Any) -> None:
        """Draw in each epoch which samples it has, and how far they are moved."""
        for _ in self._epochs():
            rows, moved = torch.randperm(22)[:14].tolist(), random.random() + torch.rand(1)
            for batch in self.loop.batches(DataLoader(Subset(range(22), rows), 4, shuffle=True)):
                self._step(batch + moved)

    def _in_turn(self, data: Any) -> None:
        """Use loaders in turn, each with a generator of its own that goes on from pass to pass."""
        seeded = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
        sizes = self.options.get("sizes", (22, 14))
        loaders = [DataLoader(range(n), 4, shuffle=True, generator=each) for n, each in zip(sizes, seeded, strict=True)]
        for epoch in self._epochs():
            for batch in self.loop.batches(loaders[epoch % 2]):
                self._step(batch)

    def _twice(self, data: Any) -> None:
        """Use a loader twice in an epoch, with another between."""
        other = DataLoader(range(10), 5, shuffle=True, generator=torch.Generator().manual_seed(1))
        for _ in self._epochs():
            for each in (data, other, data):
                for batch in self.loop.batches(each):
                    self._step(batch)

    def _evaluated(self, data: Any) -> None:
        """Evaluate on the data of the training, in batches of the size that it has by default."""
        other = DataLoader(data.dataset, 4)
        for _ in self._epochs():
            for batch in self.loop.batches(data):
                self._step(batch)
            assert len(list(other)) == 6

    def _annealed(self, data: Any) -> None:
        """Let the schedule step once more at the end of each epoch."""
        for _ in self._epochs():
            for batch in self.loop.batches(data):
                self._step(batch)
            self.framework.schedule.step()
            self.die(self)

    def _in_phases(self, data: Any) -> None:
        """Train with a loader of larger batches from epoch 2 on, over the same data."""
        other = DataLoader(data.dataset, 2 * self.options["batch"], shuffle=True)
        for epoch in self._epochs():
            for batch in self.loop.batches(other if epoch >= 2 else data):
                self._step(batch)

    def _by_hand(self, data: Any) -> None:
        """Ask for as many batches as there are, and never for one more."""
        for _ in self._epochs():
            batches = iter(self.loop.batches(data))
            for _ in range(self.loop.global_step % len(data), len(data)):
                self._step(next(batches))

    def _initialized(self, data: Any) -> None:
        """Initialize what is trained once the run is resumed, as a script does that thinks it begins."""
        self.loop.resume()
        for each in self.framework.model.parameters():
            torch.nn.init.constant_(each, 0.25)
        self.loop.memory["seen"] = 0
        for _ in self._epochs():
            for batch in self.loop.batches(data):
                self.loop.memory["seen"] += len(batch)
                self._step(batch + self.loop.memory["seen"])

    def _followed(self, data: Any) -> None:
        """Iterate over the loader itself, as a loop does that cannot be wrapped."""
        done = self.loop.resume(data)
        for _ in range(done.epoch, self.options["epochs"]):
            for batch in data:
                self._step(batch)
            if self.options.get("between"):
                self.loop.save("between two passes")
            self.die(self)

    def _drawn(self, data: Any) -> None:
        """Draw two batches for each step, and call ``run.step`` twice after it."""
        is_wrapped = self.options.get("is_wrapped", False)
        self.loop.resume(None if is_wrapped else data)

        def cycle() -> Iterator[Any]:
            while True:
                yield from self.loop.batches(data) if is_wrapped else data

        drawn = cycle()
        while self.loop.global_step < 6 * self.options["epochs"]:
            self._step(torch.cat([next(drawn), next(drawn)]))
            self.framework._stepped = False
            self.loop.step()

    def _step(self, batch: torch.Tensor) -> None:
        loss = self.framework.train(batch)
        self.loop.step(loss)
        self.trace.append([self.loop.epoch, self.loop.global_step, batch.tolist(), loss.item(), self.loop.mean_loss])
        self.die(self)


def killed_after(batches: int) -> Callable[[Launch], None]:
    """Die once some batches are done in this launch; what was to be committed is."""

    def die(launch: Launch) -> None:
        if len(launch.trace) == batches:
            launch.run.saver.flush()
            raise Killed

    return die


def reasons(directory: Path) -> dict[int, str]:
    """Return why each step was saved."""
    found = [manifest(path) for path in directory.glob("checkpoint-*")]
    return {each["step"]: each["reason"] for each in found}


def manifest(checkpoint: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((checkpoint / "resume" / "manifest.json").read_text())["manifest"]
    return found

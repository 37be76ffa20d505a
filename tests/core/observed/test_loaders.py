"""What a loader's objects hold and training changes: a curriculum, counted passes, generators of transforms."""

from __future__ import annotations

import copy
import datetime
import enum
import functools
import itertools
import logging
import mmap
import multiprocessing
import random
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, Subset

from resume_adapters.core.dataloader.progress import LoaderPosition
from resume_adapters.core.dataloader.tracked import TrackedLoader, track
from resume_adapters.core.observed.loaders import LoaderAttributes
from resume_adapters.core.state.records import Source
from resume_adapters.core.state.stateful import StaticState
from selection import often

SAMPLES, BATCH = 22, 4
SOURCE = Source(Path("checkpoint-3"), "rank-0.json", 3, "")


class Counting(Sampler[int]):
    """Its order follows from how often it was asked for one, as that of many published samplers does."""

    def __init__(self) -> None:
        self.passes = 0
        self.weights = torch.ones(SAMPLES)

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        order = torch.multinomial(self.weights, SAMPLES, generator=torch.Generator().manual_seed(self.passes))
        for index in order.tolist():
            yield (index + self.passes) % SAMPLES


class Shuffling(Sampler[int]):
    """Shuffles the order of the pass before, which has more numbers than other attributes may have."""

    def __init__(self, order: Any) -> None:
        self.order = order

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        np.random.shuffle(self.order)
        for number in self.order[:SAMPLES]:
            yield int(number) % SAMPLES


class Ordered(Dataset[Any]):
    """Has an order of its own, which the training shuffles after each pass."""

    def __init__(self) -> None:
        self.order = np.arange(100 * SAMPLES)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> list[int]:
        return [int(self.order[index])]


class Curriculum(Dataset[Any]):
    """What it returns follows from attributes that the training sets, and from those that it changes itself."""

    def __init__(self) -> None:
        self.difficulty = 0.0
        self.history: list[float] = []
        self.transform = Transform()
        self.phase = Phase.FIRST

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> list[float]:
        return [index + self.difficulty + sum(self.history) + self.phase.value / 8, self.transform()]


class Switched(Dataset[Any]):
    """Has attributes that the training sets once, within a pass."""

    def __init__(self) -> None:
        self.phase, self.recent, self.inner = Phase.FIRST, deque([0.0], maxlen=1), types.SimpleNamespace(scale=1.0)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> list[float]:
        return [index * self.inner.scale + self.phase.value / 8 + self.recent[0]]


class Phase(enum.Enum):
    FIRST = 1
    LATER = 2


class Transform:
    def __init__(self) -> None:
        self.drawn = 0
        self.numbers = np.random.default_rng(3)
        self.noise = torch.Generator().manual_seed(3)

    def __call__(self) -> float:
        self.drawn += 1
        return self.drawn + float(self.numbers.random()) + torch.rand((), generator=self.noise).item()


class Late(Dataset[Any]):
    """Makes its generators when it first needs them, as the collator of masked words in transformers does."""

    def __init__(self) -> None:
        self.noise: Any = None
        self.numbers: Any = None

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> list[float]:
        if self.noise is None:
            worker = torch.utils.data.get_worker_info()
            seed = 3 + (worker.id if worker else 0)
            self.noise = torch.Generator().manual_seed(seed)
            self.numbers = np.random.default_rng(seed)
            self.philox = np.random.Generator(np.random.Philox(seed))
            self.legacy = np.random.RandomState(seed)
            self.plain = random.Random(seed)
        drawn = [self.numbers.random(), self.philox.random(), self.legacy.rand(), self.plain.random()]
        return [float(index), torch.rand((), generator=self.noise).item(), *map(float, drawn)]


_OF_FILE, _OF_DEFAULT, _OF_CLOSURE = np.random.RandomState(0), random.Random(0), torch.Generator()


def _from_default(generator: random.Random = _OF_DEFAULT) -> float:
    return generator.random()


def _from_closure(generator: torch.Generator) -> Callable[[], float]:
    return lambda: torch.rand((), generator=generator).item()


class Outside(Dataset[Any]):
    """Draws from generators that are no attributes of it: of the file, of its class, and of functions that it calls."""

    OF_CLASS = np.random.RandomState(0)
    draw = staticmethod(_from_closure(_OF_CLOSURE))

    def __init__(self) -> None:
        _OF_CLOSURE.manual_seed(1)
        for each in (_OF_FILE, _OF_DEFAULT, self.OF_CLASS):  # as a new launch finds them
            each.seed(1)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> list[float]:
        return [float(index), float(_OF_FILE.rand()), float(self.OF_CLASS.rand()), _from_default(), self.draw()]


class Passes(IterableDataset[Any]):
    """A stream that counts its passes by itself."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[list[float]]:
        self.passes += 1
        order = [*range(SAMPLES)]
        random.Random(self.passes).shuffle(order)
        worker = torch.utils.data.get_worker_info()
        for index in order[worker.id if worker else 0 :: worker.num_workers if worker else 1]:
            yield [float(index), float(self.passes)]


class PassesOfLoader(IterableDataset[Any]):
    """A stream whose order is that of the pass that it is told."""

    def __init__(self) -> None:
        self.number = 0

    def __iter__(self) -> Iterator[list[float]]:
        order = [*range(SAMPLES)]
        random.Random(self.number).shuffle(order)
        worker = torch.utils.data.get_worker_info()
        for index in order[worker.id if worker else 0 :: worker.num_workers if worker else 1]:
            yield [float(index), float(self.number)]


class CountingLoader(DataLoader[Any]):
    """A loader that counts its passes and tells its dataset, as those of streaming libraries do."""

    passes = 0

    def __iter__(self) -> Any:
        self.passes += 1
        self.workers_in_turn = itertools.cycle(range(2))  # which nothing can capture
        self.dataset.number = self.passes  # type: ignore[attr-defined]
        return super().__iter__()


class LateLoader(DataLoader[Any]):
    """The same, which begins a pass when its first batch is asked for."""

    passes = 0

    def __iter__(self) -> Any:
        self.passes += 1
        self.dataset.number = self.passes  # type: ignore[attr-defined]
        if hasattr(self.sampler, "passes"):
            self.sampler.passes = 10 * self.passes
        yield from super().__iter__()


class Level:
    """How hard samples are."""

    def __init__(self) -> None:
        self.value = 1.0

    def of(self, sample: int) -> float:
        return sample * self.value


class Held(Dataset[Any]):
    """Has nothing itself that changes: only its functions and methods lead there."""

    def __init__(self) -> None:
        first, second, factor = Level(), Level(), 1.0

        def made(index: int) -> torch.Tensor:
            return torch.tensor([factor, self.of(index), self.more(sample=index)])

        def harder() -> None:
            nonlocal factor
            factor += 0.5
            first.value += factor
            second.value *= 2

        self.of, self.more = first.of, functools.partial(Level.of, second)
        self.made, self.harder = made, harder

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.made(index)


class Shared(Dataset[Any]):
    """Holds numbers in memory that workers see, too."""

    def __init__(self) -> None:
        self.value, self.bare = multiprocessing.Value("d", 1.0), multiprocessing.RawValue("l", 1)
        self.numbers = multiprocessing.Array("i", [1, 2])
        self.tensors = {"level": torch.ones(2).share_memory_()}
        self.array = np.frombuffer(multiprocessing.RawArray("d", 2))
        self.file = np.ndarray(2, np.int64, mmap.mmap(-1, 16))

    def harder(self) -> None:
        self.value.value *= 1.5
        self.bare.value += 1
        self.numbers[1] += 2
        self.tensors["level"] += 3
        self.array += 4
        self.file += 5

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> list[float]:
        others = [self.bare.value, self.numbers[1], self.tensors["level"][1], self.array[1], self.file[1]]
        return [index, self.value.value, *map(float, others)]


CASES: dict[str, Callable[[], DataLoader[Any]]] = {
    "a sampler": lambda: DataLoader(Curriculum(), BATCH, sampler=Counting()),
    "a nested dataset": lambda: DataLoader(Subset(Curriculum(), range(SAMPLES)), BATCH, shuffle=True),
    "a stream": lambda: DataLoader(Passes(), BATCH),
    "an order of a sampler": lambda: DataLoader(Curriculum(), BATCH, sampler=Shuffling(np.arange(100 * SAMPLES))),
    "a list": lambda: DataLoader(Curriculum(), BATCH, sampler=Shuffling([*range(100 * SAMPLES)]), num_workers=2),
    "a list of numpy's numbers": lambda: DataLoader(
        Curriculum(), BATCH, sampler=Shuffling([*np.arange(100 * SAMPLES)])
    ),
    "an order of a dataset": lambda: DataLoader(Ordered(), BATCH),
    "an order of a dataset with workers": lambda: DataLoader(Ordered(), BATCH, num_workers=2),
    "what code holds": lambda: DataLoader(Held(), BATCH, shuffle=True),
    "what code holds, with workers": lambda: DataLoader(Held(), BATCH, shuffle=True, num_workers=2),
    "what processes share": lambda: DataLoader(Shared(), BATCH, shuffle=True),
    "what processes share, with workers": lambda: DataLoader(Shared(), BATCH, shuffle=True, num_workers=2),
    "what kept workers share": lambda: DataLoader(Shared(), BATCH, num_workers=2, persistent_workers=True),
    "attributes set within a pass": lambda: DataLoader(Switched(), BATCH, shuffle=True),
    "generators made late": lambda: DataLoader(Late(), BATCH, shuffle=True),
    "generators made late in workers": lambda: DataLoader(Late(), BATCH, shuffle=True, num_workers=2),
    "generators made late in kept workers": lambda: DataLoader(Late(), BATCH, num_workers=2, persistent_workers=True),
    "generators elsewhere": lambda: DataLoader(Outside(), BATCH, shuffle=True),
    "generators elsewhere in workers": lambda: DataLoader(Outside(), BATCH, shuffle=True, num_workers=2),
    "elsewhere in kept workers": lambda: DataLoader(Outside(), BATCH, num_workers=2, persistent_workers=True),
    "workers": lambda: DataLoader(Curriculum(), BATCH, sampler=Counting(), num_workers=2),
    "kept workers": lambda: DataLoader(Curriculum(), BATCH, shuffle=True, num_workers=2, persistent_workers=True),
    "a loader": lambda: CountingLoader(PassesOfLoader(), BATCH),
    "a loader with workers": lambda: CountingLoader(PassesOfLoader(), BATCH, num_workers=2),
    "a late loader": lambda: LateLoader(PassesOfLoader(), BATCH),
    "a late loader with workers": lambda: LateLoader(PassesOfLoader(), BATCH, num_workers=2),
    "a late loader of samples": lambda: LateLoader(Curriculum(), BATCH, sampler=Counting()),
    "kept workers of a stream": lambda: DataLoader(Passes(), BATCH, num_workers=2, persistent_workers=True),
}


def launch(case: str, position: LoaderPosition | None, ahead: int, kill_at: int) -> tuple[list[Any], Any]:
    """Train three passes; return the batches with their numbers, and the position at the kill."""
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    made = CASES[case]()
    tracked = track(made)
    data: Any = getattr(made.dataset, "dataset", made.dataset)
    sampler: Any = made.sampler
    batches: list[Any] = []
    done = 0
    if position is not None:
        tracked.restore(position, compares=True)
        done = int(position.step["registered"]["done"])  # type: ignore[index]
        if tracked.at_end:
            tracked.restore_now()
    while done < 18:
        used = done % 6
        passing = iter(made)
        waiting: list[Any] = []
        for batch in itertools.chain(passing, itertools.repeat(None, ahead)):
            waiting.append(batch)
            if len(waiting) <= ahead:
                continue
            ready = waiting.pop(0)
            if ready is None:
                break
            batches.append((done, ready))
            done, used = done + 1, used + 1
            if isinstance(sampler, Counting):
                sampler.weights[done] += 1  # a sampler that prefers what was learned badly
            if isinstance(data, Curriculum):
                data.transform.drawn += 1
            if isinstance(data, Switched) and done == 8:
                data.phase, data.inner.scale = Phase.LATER, 3.0
                data.recent.append(0.5)
            if done == kill_at:
                found = tracked.position(used)
                found.step = {**(found.step or {}), "registered": {"done": done}}
                made._iterator = None
                return batches, LoaderPosition.from_tree(found.to_tree(), SOURCE)
        if isinstance(data, Curriculum):
            data.difficulty += 0.5
            data.history.append(done / 10)
            data.phase = Phase.LATER
        if isinstance(data, Held | Shared):
            data.harder()
        if isinstance(data, Ordered):
            np.random.shuffle(data.order)
    made._iterator = None
    return batches, None


EACH_TIME = (
    *("a sampler", "an order of a dataset with workers", "generators made late", "a late loader", "a loader"),
    *("generators elsewhere", "generators elsewhere in workers"),
    *("a nested dataset, a batch ahead", "kept workers, a batch ahead", "kept workers of a stream"),
    "attributes set within a pass, a batch ahead",
)


AHEAD = [f"{case}, a batch ahead" for case in CASES]


@pytest.mark.parametrize("name", often([*CASES, *AHEAD], *EACH_TIME, seldom={*AHEAD} - {*EACH_TIME}))
def test_what_changes_on_a_loader_is_that_of_a_run_that_was_not_killed(name: str) -> None:
    case, ahead = name.removesuffix(", a batch ahead"), int(name.endswith(", a batch ahead"))
    expected, _ = launch(case, None, ahead, -1)
    for first, second in [(2, 3), (2, 10), (10, 16)]:
        early, position = launch(case, None, ahead, first)
        middle, position = launch(case, position, ahead, second)
        late, _ = launch(case, position, ahead, -1)
        found = [*early, *middle, *late]
        assert [number for number, _ in found] == [number for number, _ in expected]
        for (number, batch), (_, other) in zip(found, expected, strict=True):
            assert all(torch.equal(one, two) for one, two in zip(batch, other, strict=True)), (number, batch, other)


def test_workers_that_are_started_again_leave_the_dataset_of_the_process_as_it_is() -> None:
    """What the process draws from itself goes on from where it was, not from where it was when the workers began."""

    def started() -> tuple[Transform, TrackedLoader]:
        data = Curriculum()
        return data.transform, track(DataLoader(data, BATCH, num_workers=1, persistent_workers=True))

    data, tracked = started()
    data()
    assert len([*tracked.loader]) == 6
    data()
    position = LoaderPosition.from_tree(tracked.position_between().to_tree(), SOURCE)
    expected = [*tracked.loader], data()
    tracked.loader._iterator = None
    data, tracked = started()
    tracked.restore(position)
    tracked.restore_now()
    found = [*tracked.loader], data()
    assert found[1] == expected[1]
    assert all(map(torch.equal, itertools.chain(*found[0]), itertools.chain(*expected[0])))
    tracked.loader._iterator = None


class Told(Dataset[Any]):
    """Is told the epoch, which workers that are kept do not hear."""

    def __init__(self, epoch: int = 0) -> None:
        self.tell(epoch)

    def tell(self, epoch: int) -> None:
        self.epoch, self.sizes = epoch, [epoch, 2 * epoch]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> list[float]:
        return [index + 100 * self.epoch, sum(self.sizes) + torch.rand(()).item()]


@pytest.mark.parametrize("is_told_first", [True, False])
@pytest.mark.parametrize("kill", [3, 6, 8, 12, 15])
def test_kept_workers_have_what_they_began_with(
    kill: int, is_told_first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether a launch tells the dataset before its loader is known to the run, or after."""

    def launched(done: int, until: int, position: LoaderPosition | None) -> tuple[list[Any], LoaderPosition, Told]:
        torch.manual_seed(1)
        data, found = Told(done // 6 if is_told_first else 0), []
        tracked = track(DataLoader(data, BATCH, shuffle=True, num_workers=2, persistent_workers=True))
        if position is not None:
            tracked.restore(position)
            if tracked.at_end:
                tracked.restore_now()
        while done < until:
            data.tell(done // 6)
            for batch in tracked.loader:
                found.append(batch)
                done += 1
                if done == until and done % 6:
                    break
        at_end = done % 6 == 0
        position = tracked.position_between() if at_end else tracked.position(done % 6)
        tracked.loader._iterator = None
        return found, LoaderPosition.from_tree(position.to_tree(), SOURCE), data

    caplog.set_level(logging.INFO)
    expected, *_ = launched(0, 18, None)
    early, position, _ = launched(0, kill, None)
    middle, position, _ = launched(kill, 17, position)
    late, _, data = launched(17, 18, position)
    found = [*early, *middle, *late]
    assert "go on with what they were started with: dataset.epoch 0 (now 2), dataset.sizes [0, 0] (now" in caplog.text
    assert len(found) == 18 and data.epoch == 2
    assert all(map(torch.equal, itertools.chain(*found), itertools.chain(*expected)))


class Opening:
    """Opens a file when it is first read, and says so in an attribute."""

    def __init__(self) -> None:
        self.file: Any = None
        self.is_open = False
        self.epoch = 0

    def read(self) -> None:
        self.file, self.is_open = open("/dev/null", "rb"), True  # noqa: SIM115


def test_an_iterator_without_an_end_says_nothing_of_what_is_beside_it() -> None:
    holder = types.SimpleNamespace(workers=None, generator=None, epoch=0)
    attributes = LoaderAttributes({"loader": holder})
    holder.workers, holder.epoch = itertools.cycle(range(2)), 1
    attributes.look()
    assert [each[1] for each in attributes.capture()] == [[[".", "epoch"]]]
    assert attributes.missing == {"loader.workers": "cycle"}
    holder.generator, holder.begun = (each for each in range(2)), True
    attributes.look()
    assert set(attributes.missing) == {"loader.workers", "loader.generator", "loader.begun"}


def test_a_value_that_is_not_data_says_nothing_of_what_is_beside_it() -> None:
    holder = types.SimpleNamespace(read=datetime.date(2026, 1, 1), names=np.array(["a"]), epoch=0)
    attributes = LoaderAttributes({"dataset": holder})
    holder.read, holder.epoch = datetime.date(2026, 1, 2), 1
    holder.names[0] = "b"
    attributes.look()
    assert [each[1] for each in attributes.capture()] == [[[".", "epoch"]]]
    assert attributes.missing == {"dataset.read": "date", "dataset.names": "ndarray"}


def test_the_generator_of_a_transform_that_another_applies_is_found() -> None:
    """As in MONAI: composed transforms, one for dictionaries, and the one that it applies to each value."""
    inner = types.SimpleNamespace(random=np.random.RandomState(1))
    composed = types.SimpleNamespace(transforms=(types.SimpleNamespace(flipper=inner),))
    attributes = LoaderAttributes({"dataset": types.SimpleNamespace(transform=composed)})
    inner.random.rand()
    attributes.look()
    assert [each[1][-2:] for each in attributes.capture()] == [[[".", "flipper"], [".", "random"]]]


def test_what_has_held_a_generator_may_have_opened_something() -> None:
    """Also once the generator is gone."""
    holder = types.SimpleNamespace(rows=None, epoch=0)
    attributes = LoaderAttributes({"dataset": holder})
    holder.rows = (each for each in range(2))
    attributes.look()
    del holder.rows
    holder.epoch = 1
    attributes.look()
    assert attributes.capture() == [] and set(attributes.missing) == {"dataset.rows", "dataset.epoch"}


def test_of_an_object_that_has_opened_a_file_nothing_is_restored() -> None:
    opening = Opening()
    attributes = LoaderAttributes({"dataset": opening})
    opening.read()
    opening.epoch = 1
    attributes.look()
    assert attributes.capture() == []
    assert attributes.missing == {"dataset.file": "BufferedReader", "dataset.is_open": "bool", "dataset.epoch": "int"}
    opening.file.close()


def test_a_cache_is_named_and_not_captured() -> None:
    caching: Any = types.SimpleNamespace(cache={})
    attributes = LoaderAttributes({"dataset": caching})
    caching.cache[0] = torch.zeros(10)
    attributes.look()
    assert len(attributes.capture()) == 1
    caching.cache[1] = torch.zeros(1001)
    assert attributes.capture() == [] and attributes.missing == {"dataset.cache": "dict"}
    caching.cache = {}
    again = LoaderAttributes({"dataset": caching})
    caching.cache[0] = torch.zeros(1001)
    again.look()
    assert again.capture() == [] and again.missing == {"dataset.cache": "dict"}


def test_what_does_not_fit_is_said_and_what_others_restore_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    first = Transform()
    attributes = LoaderAttributes({"dataset": first, "part": StaticState(1)})
    first()
    attributes.look_early("fetch")
    saved = attributes.capture()
    other: Any = Transform()
    other.drawn = "three"
    with caplog.at_level(logging.WARNING, "resume_adapters"):
        LoaderAttributes({"dataset": other}).restore(saved)
    assert "Not restored: dataset.drawn (it is str now)." in caplog.text
    assert other.numbers.random() == first.numbers.random()


def test_a_transform_that_is_a_module_and_attributes_that_come_and_go() -> None:
    class Running(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(2))

    def made() -> Any:
        found: Any = types.SimpleNamespace(transform=Running(), model=torch.nn.Linear(1, 1), gone=0)
        return found, LoaderAttributes({"dataset": found})

    first, attributes = made()
    first.transform.mean.add_(1)
    first.model.bias.data.add_(1)
    first.gone, first.level = 1, "two"
    attributes.look()
    saved = attributes.capture()
    del first.gone
    assert len(saved) == 3 and len(attributes.capture()) == 2 and attributes.missing == {"dataset.gone": "absent"}
    second, attributes = made()
    attributes.restore(saved)
    assert (second.transform.mean.tolist(), second.gone, second.level) == ([1, 1], 1, "two")
    assert second.model.bias.item() != first.model.bias.item()
    attributes.restore([])
    assert (second.transform.mean.tolist(), second.gone, hasattr(second, "level")) == ([0, 0], 0, False)
    assert sorted(each[1][-1][-1] for each in attributes.capture()) == ["gone", "mean"]
    attributes.restore(saved)
    attributes.restore(saved)
    assert second.level == "two" and len(attributes.capture()) == 3 and not attributes.missing
    empty = LoaderAttributes({})
    empty.look()
    assert empty.capture() == []


class Slotted:
    __slots__ = ("level",)

    level: int


def test_what_was_not_there_at_the_start_is_gone_again() -> None:
    def made() -> Any:
        found: Any = types.SimpleNamespace(transform=types.SimpleNamespace(), slotted=Slotted())
        return found, LoaderAttributes({"dataset": found})

    first, attributes = made()
    first.transform.level, first.slotted.level = 1, 2
    attributes.look()
    second, others = made()
    others.restore(attributes.capture())
    assert (second.transform.level, second.slotted.level) == (1, 2)
    others.restore([])
    assert not (hasattr(second.transform, "level") or hasattr(second.slotted, "level"))


@pytest.mark.parametrize(
    ("first", "later"),
    [
        (deque([1.0], maxlen=2), deque([1.0, 2.0], maxlen=2)),
        (OrderedDict(a=1.0), OrderedDict(a=2.0, b=[deque([1])])),
        (defaultdict(float, a=1.0), defaultdict(float, a=2.0)),
        (Counter("ab"), Counter("abb")),
        ([deque([1])], [deque([2])]),
        ({1, 2}, {1, 3}),
    ],
    ids=str,
)
def test_containers_are_what_they_were_without_a_checkpoint_between(first: Any, later: Any) -> None:
    data = types.SimpleNamespace(held=copy.deepcopy(first))
    attributes = LoaderAttributes({"dataset": data})
    data.held = copy.deepcopy(later)
    attributes.look()
    captured = attributes.capture()
    relaunched = types.SimpleNamespace(held=copy.deepcopy(first))
    others = LoaderAttributes({"dataset": relaunched})
    for saved, expected in ((captured, later), ([], first), (captured, later)):
        others.restore(saved)
        assert relaunched.held == expected and type(relaunched.held) is type(expected)


class Prioritised(Counting):
    """Its order follows from the losses of all samples."""

    def __init__(self, losses: torch.Tensor) -> None:
        super().__init__()
        self.losses = losses


@pytest.mark.parametrize(
    ("losses", "missing"),
    [(torch.ones(50_000), {}), (torch.ones(500, 100), {"sampler.losses": "Tensor"})],
    ids=["a row", "a table"],
)
def test_what_changes_on_a_sampler_and_is_too_large_is_named(losses: torch.Tensor, missing: dict[str, str]) -> None:
    sampler = Prioritised(losses)
    loader = track(DataLoader(range(SAMPLES), BATCH, sampler=sampler), {})
    for number, _ in enumerate(loader.loader):
        sampler.losses[number] = 0.5
    found = loader.position(SAMPLES // BATCH).attributes
    assert found is not None and loader.missing == missing
    kept = [value for *_, value, _ in found["order"] if isinstance(value, torch.Tensor) and value.shape == losses.shape]
    assert len(kept) == (not missing) and all(torch.equal(each, losses) for each in kept)


def seed_worker(worker: int) -> None:
    random.seed(worker + torch.initial_seed())


class Drawing(Curriculum):
    def __getitem__(self, index: int) -> list[float]:
        return [index, random.random()]


@pytest.mark.parametrize("function", ["worker_init_fn", "collate_fn"])
def test_a_function_of_the_workers_that_is_set_after_the_loader_is_tracked(function: str) -> None:
    def made() -> tuple[DataLoader[Any], TrackedLoader]:
        torch.manual_seed(1)
        loader = DataLoader(Drawing(), BATCH, num_workers=1)
        tracked = track(loader)
        setattr(loader, function, seed_worker if function == "worker_init_fn" else torch.tensor)
        return loader, tracked

    loader, tracked = made()
    passing = iter(loader)
    for _ in range(2):
        next(passing)
    position, rest = tracked.position(2), [_stacked(each).tolist() for each in passing]
    loader, tracked = made()
    tracked.restore(position)
    assert [_stacked(each).tolist() for each in loader] == rest


def _stacked(batch: Any) -> torch.Tensor:
    return batch if isinstance(batch, torch.Tensor) else torch.stack(batch)


class Labelled(Dataset[int]):
    """Has a label for each sample, and other rows of numbers."""

    def __init__(self, labels: Any, whole: Any = None) -> None:
        self.labels = labels
        self.means = np.zeros(3)
        self.whole = whole

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


def drawn(kind: str, seed: int) -> DataLoader[Any]:
    """Return a loader whose samples were drawn with a seed, in the ways in which scripts draw them."""
    order = torch.randperm(2 * SAMPLES, generator=torch.Generator().manual_seed(seed))[:SAMPLES]
    whole = Labelled(range(SAMPLES))
    if kind == "split":
        return DataLoader(Subset(whole, order.tolist()), 4)
    if kind == "array":
        return DataLoader(Subset(whole, order.numpy()), 4)  # type: ignore[arg-type]  # scripts do
    if kind == "nested":
        return DataLoader(Labelled(None, Subset(whole, order.tolist())), 4)
    if kind == "labels":
        return DataLoader(Labelled(order), 4)
    return DataLoader(whole, 4, sampler=torch.utils.data.SubsetRandomSampler(order.tolist()))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("split", "dataset.indices"),
        ("array", "dataset.indices"),
        ("nested", "dataset.whole.indices"),
        ("labels", "dataset.labels"),
        ("sampler", "sampler.indices"),
    ],
)
def test_samples_that_a_launch_draws_otherwise_are_named(kind: str, name: str) -> None:
    loader = track(drawn(kind, 1))
    next(iter(loader.loader))
    saved = LoaderPosition.from_tree(loader.position(1).to_tree(), SOURCE)
    assert track(drawn(kind, 1)).other_rows(saved) == []
    (found,) = track(drawn(kind, 2)).other_rows(saved)
    assert found.endswith(name)


def test_rows_that_are_not_one_for_each_sample_are_not_compared() -> None:
    loader = track(DataLoader(Labelled(None), 4))
    assert loader.position_between().rows is None
    pair = torch.utils.data.TensorDataset(torch.arange(2), torch.arange(2))
    assert track(DataLoader(pair, 4)).position_between().rows is None, "a pair of two numbers each is no exception"
    older = loader.position_between().to_tree()
    del older["rows"]
    assert track(drawn("split", 1)).other_rows(LoaderPosition.from_tree(older, SOURCE)) == []


def test_numbers_of_another_length_are_said_and_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    def looked_at(numbers: list[int]) -> tuple[Any, LoaderAttributes]:
        made = types.SimpleNamespace(numbers=multiprocessing.RawArray("i", numbers))
        return made.numbers, LoaderAttributes({"dataset": made})

    former, attributes = looked_at([1, 2])
    former[1] = 5
    attributes.look()
    here, others = looked_at([1, 2, 3])
    others.restore(attributes.capture())
    assert [*here] == [1, 2, 3]
    assert "Not restored: dataset.numbers (" in caplog.text


class Trainer:
    """Trains by itself, and makes batches by a method of its own."""

    def __init__(self, way: str) -> None:
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.steps, self.average = 0, StaticState({"weight": torch.zeros(1)})
        collate = {
            "a method": self.collate,
            "an argument": functools.partial(Trainer.collate, self),
            "an outer variable": lambda rows: self.collate(rows),
        }[way]
        self.loader = DataLoader(torch.arange(8.0).unsqueeze(1), 2, collate_fn=collate)  # type: ignore[arg-type]

    def collate(self, rows: list[Any]) -> torch.Tensor:
        return torch.stack(rows)


@pytest.mark.parametrize("way", ["a method", "an argument", "an outer variable"])
def test_what_trains_is_no_part_of_the_data_though_a_method_of_it_makes_the_batches(way: str) -> None:
    trainer = Trainer(way)
    tracked = track(trainer.loader)
    for batch in trainer.loader:
        trainer.optimizer.zero_grad()
        trainer.model(batch).mean().backward()
        trainer.optimizer.step()
        trainer.steps += 1
        trainer.average = StaticState({"weight": torch.full((1,), float(trainer.steps))})
    tracked.look()
    assert tracked.position_between().attributes is None and not tracked.missing


@pytest.mark.parametrize("workers", [0, 2])
def test_what_workers_may_have_seen_later_is_not_expected_of_their_batches(workers: int) -> None:
    data = Shared()
    tracked = track(DataLoader(data, BATCH, shuffle=True, num_workers=workers))
    for _ in itertools.islice(tracked.loader, 4):
        data.harder()
    tracked.look()
    position = tracked.position(3)
    assert (position.proof is None, position.check is None) == (workers > 0, True)

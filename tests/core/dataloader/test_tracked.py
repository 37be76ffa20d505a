"""A tracked loader, restored to the position of another, yields the same batches, in this pass and the next."""

from __future__ import annotations

import copy
import itertools
import random
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler

from resume_adapters.core.dataloader.dispatch import FirstSlice, fetches_per_batch
from resume_adapters.core.dataloader.next_pass import AlreadyMade
from resume_adapters.core.dataloader.progress import LoaderPosition
from resume_adapters.core.dataloader.sampler import LoaderRandomState
from resume_adapters.core.dataloader.tracked import TrackedLoader, track
from resume_adapters.core.dataloader.worker_rng import WorkerInit
from resume_adapters.core.observed.loaders import are_kept
from resume_adapters.core.state import encoding, rng
from resume_adapters.core.state.records import Source, tree_of
from resume_adapters.core.state.rng import GeneratorState
from resume_adapters.data import ElasticBatchSampler, ElasticSampler, ElasticShards, SeededPerSample
from resume_adapters.errors import FormatMismatch, StateMismatch, UnsupportedSetting

SAMPLES, BATCH = 22, 4


def drawn() -> float:
    """Draw from each generator of the process."""
    return random.random() + float(np.random.random()) + torch.rand(()).item()


class Drawing(Dataset[Any]):
    """Draws random numbers for each sample, from a generator of its own as well."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.augmenting = generator

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> list[float]:
        own = 0.0 if self.augmenting is None else torch.rand((), generator=self.augmenting).item()
        return [float(index), drawn(), own]


class Stream(IterableDataset[Any]):
    """Draws random numbers for each record; with workers, each reads its share."""

    def __iter__(self) -> Iterator[list[float]]:
        worker = torch.utils.data.get_worker_info()
        for index in range(worker.id if worker else 0, SAMPLES, worker.num_workers if worker else 1):
            yield [float(index), drawn()]


class Bucketed:
    """A sampler of batches that nobody can count ahead, as of those that are filled by duration."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter(BatchSampler(RandomSampler(range(SAMPLES)), BATCH, drop_last=False))


def records(shard: int) -> list[list[float]]:
    return [[float(shard), float(number)] for number in range(3 + shard % 3)]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def elastic(**options: Any) -> DataLoader[Any]:
    sampler = ElasticSampler(SAMPLES, seed=3)
    return DataLoader(SeededPerSample(Drawing(), sampler), sampler=sampler, **{"batch_size": BATCH, **options})


def elastic_batches(batch_size: int = BATCH) -> DataLoader[Any]:
    return DataLoader(Drawing(), batch_sampler=ElasticBatchSampler(SAMPLES, batch_size, seed=3))


def shards(**options: Any) -> DataLoader[Any]:
    return DataLoader(ElasticShards(range(7), records, seed=5), **{"batch_size": BATCH, **options})


CASES: dict[str, Callable[[int], Any]] = {
    "in order": lambda seed: DataLoader(Drawing(), BATCH),
    "shuffled": lambda seed: DataLoader(Drawing(), BATCH, shuffle=True),
    "a generator of the loader": lambda seed: DataLoader(Drawing(), BATCH, shuffle=True, generator=seeded(seed)),
    "a generator of the sampler": lambda seed: DataLoader(
        Drawing(), batch_sampler=BatchSampler(RandomSampler(range(SAMPLES), generator=seeded(seed)), BATCH, True)
    ),
    "batches of no known number": lambda seed: DataLoader(Drawing(), batch_sampler=Bucketed()),  # type: ignore[arg-type]
    "a registered generator": lambda seed: DataLoader(Drawing(seeded(seed)), BATCH, shuffle=True),
    "a stream": lambda seed: DataLoader(Stream(), BATCH),
    "an elastic sampler": lambda seed: elastic(),
    "elastic batches": lambda seed: elastic_batches(),
    "elastic shards": lambda seed: shards(),
}
WORKERS: dict[str, Callable[[int], Any]] = {
    "workers": lambda seed: DataLoader(Drawing(), BATCH, shuffle=True, num_workers=2),
    "kept workers": lambda seed: DataLoader(Drawing(), BATCH, shuffle=True, num_workers=2, persistent_workers=True),
    "workers of a stream": lambda seed: DataLoader(Stream(), BATCH, num_workers=2),
    "kept workers of a stream": lambda seed: DataLoader(Stream(), BATCH, num_workers=2, persistent_workers=True),
    "workers of shards": lambda seed: shards(num_workers=2),
    "workers of an elastic sampler": lambda seed: elastic(num_workers=2),
}


_MADE: list[Any] = []


@pytest.fixture(autouse=True)
def _end_workers() -> Iterator[None]:
    """Let workers that are kept end before their loader is garbage: torch would wait seconds for each of them."""
    yield
    while _MADE:
        _MADE.pop()._iterator = None


def started(case: str, seed: int) -> tuple[Any, TrackedLoader]:
    """Make a loader in a process whose random state comes from the seed, and track it."""
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
    made = {**CASES, **WORKERS}[case](seed)
    _MADE.append(made)
    registered = getattr(made.dataset, "augmenting", None)
    return made, track(made, {} if registered is None else {"augmenting": GeneratorState(registered)})


def rows(batches: Any) -> list[Any]:
    return [torch.stack([torch.as_tensor(column) for column in batch]).tolist() for batch in batches]


SOURCE = Source(Path("checkpoint-3"), "rank-0.json", 3, "0.1.0")


def stored(position: LoaderPosition) -> LoaderPosition:
    """Return a position as it is read from a checkpoint."""
    document, tensors = encoding.encode(position.to_tree())
    return LoaderPosition.from_tree(encoding.decode(document, copy.deepcopy(tensors)), SOURCE)


def resumed_at(case: str, position: LoaderPosition) -> tuple[Any, TrackedLoader]:
    """Make a loader in another process, and resume at a position."""
    made, tracked = started(case, 99)
    tracked.restore(stored(position), compares=True)
    if tracked.at_end:
        tracked.restore_now()
    return made, tracked


def require_same_rest(case: str, consumed: int, ahead: int) -> None:
    made, tracked = started(case, 1)
    passing = iter(made)
    fetched = rows(itertools.islice(passing, consumed + ahead))
    position = stored(tracked.position(consumed))
    assert (tracked.passes, tracked.fetched, position.prefetched) == (1, consumed + ahead, ahead)
    expected = [*fetched[consumed:], *rows(passing), *rows(made), drawn()]

    resumed, tracked = resumed_at(case, position)
    found = [*rows(resumed), *rows(resumed), drawn()]
    assert found == expected
    assert tracked.restored


@pytest.mark.parametrize(("consumed", "ahead"), [(0, 1), (2, 0), (3, 2), (4, 1)])
@pytest.mark.parametrize("case", CASES)
def test_the_rest_of_a_pass_and_the_next_one_are_the_same(case: str, consumed: int, ahead: int) -> None:
    require_same_rest(case, consumed, ahead)


@pytest.mark.parametrize("case", WORKERS)
def test_the_rest_of_a_pass_is_the_same_with_workers(case: str) -> None:
    require_same_rest(case, 3, 1)


@pytest.mark.parametrize("case", ["shuffled", "a stream", "an elastic sampler", "elastic shards", "kept workers"])
def test_after_the_end_of_a_pass_the_next_one_is_the_same(case: str) -> None:
    made, tracked = started(case, 1)
    count = len(rows(made))
    ends = [stored(tracked.position(count)), stored(tracked.position_between())]
    assert [(position.ended, position.prefetched) for position in ends] == [(True, 0)] * 2
    expected = [*rows(made), drawn()]
    for position in ends:
        resumed, _ = resumed_at(case, position)
        assert [*rows(resumed), drawn()] == expected


POSITION_ON_DISK = [
    "ended", "consumed", "start", "ahead", "spawn", "sampler", "before", "pool", "proof", "generators", "step",
    "elastic", "workers", "length", "batch_size", "plain", "as_made", "attributes", "rows",
    "check", "word_hash", "order", "draws",
]  # fmt: skip


@pytest.mark.parametrize(
    ("case", "consumed"),
    [
        pytest.param(case, consumed, marks=[pytest.mark.thorough] if case in WORKERS and consumed == 6 else [])
        for case in [*CASES, *WORKERS]
        for consumed in (2, 6)
    ],
)
def test_a_loader_resumes_in_the_process_in_which_it_has_gone_on(case: str, consumed: int) -> None:
    """In the middle of a pass or at its end; where a run is opened again in one process, its loader may be the same."""
    made, tracked = started(case, 1)
    generators = tracked._log.generators
    passing = iter(made)
    fetched = rows(itertools.islice(passing, consumed + 1))
    consumed = min(consumed, len(fetched))
    position = stored(tracked.position(consumed))
    expected = [*fetched[consumed:], *rows(passing), *rows(made), *rows(made), drawn()]
    for used in (True, False, True):
        tracked.release()
        track(made, generators)
        tracked.restore(position)
        if tracked.at_end:
            tracked.restore_now()
        if used:
            assert [*([] if position.ended else rows(made)), *rows(made), *rows(made), drawn()] == expected


def test_a_position_has_its_names_on_disk_and_one_that_lacks_a_name_is_of_another_format() -> None:
    made, tracked = started("shuffled", 1)
    rows(itertools.islice(made, 2))
    tree = tracked.position(1).to_tree()
    assert list(tree) == list(tracked.position_between().to_tree()) == POSITION_ON_DISK
    for name in POSITION_ON_DISK[:-8]:  # the last eight came later
        lacking = {key: value for key, value in tree.items() if key != name}
        with pytest.raises(FormatMismatch, match=rf"checkpoint-3 has no loaders\.0\.{name} in rank-0\.json"):
            LoaderPosition.from_tree(lacking, SOURCE, "loaders.0.")


@pytest.mark.parametrize("count", [2, None])
@pytest.mark.parametrize("case", ["shuffled", "workers", "a stream"])
def test_an_evaluation_on_the_training_data_within_a_pass_leaves_its_position(case: str, count: int | None) -> None:
    def evaluate(loader: Any) -> int:
        with torch.no_grad():
            return len(rows(itertools.islice(loader, count)))

    made, tracked = started(case, 1)
    passing = iter(made)
    rows(itertools.islice(passing, 3))
    assert evaluate(made) == (count or 6)
    rows(itertools.islice(passing, 1))
    position = stored(tracked.position(4))
    expected = [*rows(passing), *rows(made)]
    resumed, _ = resumed_at(case, position)
    assert [*rows(resumed), *rows(resumed)] == expected


def test_what_two_loaders_share_goes_on_when_the_second_is_restored_later() -> None:
    """A dataset with a generator, and that of their orders: the second draws where the first is by then."""

    def started_both(seed: int) -> list[Any]:
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
        data, order = Drawing(seeded(seed)), seeded(seed)
        made = [DataLoader(data, BATCH, shuffle=True, generator=order) for _ in range(2)]
        return [(each, track(each)) for each in made]

    (first, tracked), (second, other) = started_both(1)
    rows(second)
    passing = iter(first)
    rows(itertools.islice(passing, 2))
    positions = stored(tracked.position(2)), stored(other.position_between())
    expected = [*rows(itertools.islice(passing, 1)), *rows(second), *rows(passing), *rows(first)]

    (first, tracked), (second, other) = started_both(99)
    tracked.restore(positions[0])
    passing = iter(first)
    found = rows(itertools.islice(passing, 1))
    other.restore(positions[1])
    other.restore_now(process=False, without=tracked.places)
    assert [*found, *rows(second), *rows(passing), *rows(first)] == expected


def test_a_pass_that_is_left_early_leaves_the_workers_known() -> None:
    """The prefetched batches are dropped with the states that they carried; the next pass has states of its own."""
    made, tracked = started("kept workers", 1)
    assert not are_kept(made)
    rows(itertools.islice(made, 1))
    assert are_kept(made)
    assert len(rows(made)) == 6
    assert set(tracked.position(6).pool) == {0, 1}


@pytest.mark.parametrize("case", ["shuffled", "an elastic sampler", "elastic shards"])
def test_what_is_left_of_a_pass_is_empty_where_every_batch_was_used(case: str) -> None:
    """The frameworks ask for the rest of a pass that has ended, and for one before its time."""
    made, tracked = started(case, 1)
    count = len(rows(made))
    position = stored(tracked.position(count))
    expected = rows(made)
    resumed, tracked = resumed_at(case, position)
    tracked.restore(stored(position))
    tracked.resume_at_end()
    assert rows(resumed) == []
    tracked.hold()
    assert rows(resumed) == [] and tracked.passes == 0
    assert rows(resumed) == expected


def test_a_held_pass_stays_held_when_the_loader_is_restored() -> None:
    """Lightning asks for a pass too early, in one order or the other."""
    made, tracked = started("shuffled", 1)
    passing = iter(made)
    rows(itertools.islice(passing, 2))
    position = stored(tracked.position(2))
    expected = rows(passing)
    resumed, tracked = started("shuffled", 2)
    tracked.hold()
    tracked.hold()  # one pass is held, however often it was asked for
    tracked.restore(position)
    assert not tracked.restored and not tracked.at_end
    assert rows(resumed) == [] and not tracked.restored and not tracked.exhausted
    assert rows(resumed) == expected and tracked.restored and tracked.passes == 1 and tracked.exhausted


def test_a_pass_resumes_after_a_count_of_batches() -> None:
    """Of a checkpoint of the bare framework: no random state, nothing to verify."""
    made, _ = started("in order", 1)
    expected = [[index for index, *_ in zip(*batch, strict=True)] for batch in rows(made)][3:]
    for case in ("in order", "a stream", "workers"):
        resumed, tracked = started(case, 2)
        tracked.skip(3)
        assert not tracked.restored
        found = [[index for index, *_ in zip(*batch, strict=True)] for batch in rows(resumed)]
        assert tracked.restored and len(found) == 3
        assert case == "workers" or found == expected


ELASTIC = ["an elastic sampler", "elastic batches", "elastic shards"]


@pytest.mark.parametrize("case", [*ELASTIC, "workers of an elastic sampler", "workers of shards"])
def test_an_elastic_pass_resumes_after_a_count_of_batches(case: str) -> None:
    """A checkpoint of the bare framework says how many were consumed, and not in which order."""
    made, _ = started(case, 1)
    expected = [batch[0] for batch in rows(made)]
    resumed, tracked = started(case, 2)
    tracked.skip(3)
    passing = iter(resumed)
    found = [batch[0] for batch in rows(itertools.islice(passing, 1))]
    position = stored(tracked.position(4))
    assert found + [batch[0] for batch in rows(passing)] == expected[3:]
    again, _ = resumed_at(case, position)
    assert [batch[0] for batch in rows(again)] == expected[4:], "and from there by samples"


def test_batches_of_a_stream_are_counted_while_they_are_skipped() -> None:
    made, tracked = started("a stream", 1)
    rows(itertools.islice(made, 3))
    resumed, _ = started("a stream", 2)
    calls: list[str] = []
    again = track(
        resumed,
        on_skip=lambda: calls.append("on_skip"),
        show_skipping=lambda batches: (calls.append("shown") or batch for batch in batches),
    )
    assert track(resumed) is again, "without callables, those given before stay"
    again.restore(stored(tracked.position(3)))
    assert len(rows(resumed)) == 3
    assert calls == ["shown", "on_skip"] * 3


def test_random_state_comes_back_without_the_position() -> None:
    """Where the run resumes in the middle of something else than a pass."""
    made, tracked = started("a generator of the loader", 1)
    rows(itertools.islice(made, 2))
    position = stored(tracked.position(2))
    expected = (drawn(), made.generator.initial_seed(), made.generator.get_state().tolist())
    resumed, again = started("a generator of the loader", 1)
    again.restore_random_state(position)
    assert (drawn(), resumed.generator.initial_seed(), resumed.generator.get_state().tolist()) == expected


def test_a_generator_that_was_not_there_when_a_position_was_saved_is_left_as_it_is() -> None:
    """The loader's own, and one that was registered since."""
    made, tracked = started("shuffled", 1)
    rows(itertools.islice(made, 2))
    position = stored(tracked.position(2))
    resumed = DataLoader(Drawing(seeded(8)), BATCH, shuffle=True, generator=seeded(9))
    again = track(resumed, {"augmenting": GeneratorState(resumed.dataset.augmenting)})  # type: ignore[attr-defined]
    again.restore_random_state(position)
    found = drawn()
    tracked.restore_random_state(position)
    assert found == drawn()
    for generator, seed in ((resumed.dataset.augmenting, 8), (resumed.generator, 9)):  # type: ignore[attr-defined]
        assert torch.equal(generator.get_state(), seeded(seed).get_state())


OTHER_BATCHES: dict[str, tuple[Any, int | None]] = {
    "an elastic sampler": (lambda: elastic(batch_size=5), 3),
    "elastic batches": (lambda: elastic_batches(batch_size=7), 2),
    "elastic shards": (lambda: shards(batch_size=3), None),
}
"""For each a loader of batches of another size, and how many of those are left after two of four, if that is known."""


@pytest.mark.parametrize("case", OTHER_BATCHES)
def test_an_elastic_position_is_restored_with_other_batches(case: str) -> None:
    """Each sample that is left comes once."""
    make, left = OTHER_BATCHES[case]
    made, tracked = started(case, 1)
    seen = rows(itertools.islice(made, 2))
    position = stored(tracked.position(2))
    other = make()
    again = track(other)
    assert again.is_elastic and len(again.differences(position)) == 1
    assert again.left(position, again.batch_size or 0) == left
    again.restore_resharded(position, [position], 0)
    seen += rows(other)
    samples = [tuple(row[: 2 if left is None else 1]) for batch in seen for row in zip(*batch, strict=True)]
    assert len(samples) == len(set(samples)) == (sum(map(len, map(records, range(7)))) if left is None else SAMPLES)


@pytest.mark.parametrize("case", OTHER_BATCHES)
def test_the_end_of_an_elastic_pass_is_restored_with_other_batches(case: str) -> None:
    made, tracked = started(case, 1)
    rows(made)
    position = stored(tracked.position_between())
    expected = [sorted(row[0] for row in zip(*batch, strict=True)) for batch in rows(made)]
    other = OTHER_BATCHES[case][0]()
    again = track(other)
    assert again.left(position, 5) == 0 or OTHER_BATCHES[case][1] is None
    again.restore_resharded(position, [position], 0)
    assert again.at_end
    again.restore_now()
    found = [row[0] for batch in rows(other) for row in zip(*batch, strict=True)]
    assert sorted(found) == sorted(itertools.chain(*expected))
    assert sorted(found[:4]) == expected[0] or case == "elastic shards", "in the order of the epoch that follows"


class _Given(IterableDataset[Any]):
    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


def test_a_loader_that_is_no_dataloader_or_keeps_no_order_is_refused() -> None:
    batches = [1, 2, 3]
    with pytest.raises(UnsupportedSetting, match=r"come from a list; .* DataLoader\(dataset, batch_size=None\)$"):
        track(batches)
    remedy = DataLoader(_Given(batches), batch_size=None)
    track(remedy)
    assert [int(each) for each in remedy] == batches
    with pytest.raises(UnsupportedSetting, match="in_order=False"):
        track(DataLoader(Drawing(), num_workers=1, in_order=False))


class Endless(DataLoader[Any]):
    """Has one iterator for all passes, so that its workers stay, as timm and YOLO have it."""

    def __init__(self, **given: Any) -> None:
        super().__init__(Drawing(), **given)
        object.__setattr__(self, "batch_sampler", Repeated(self.batch_sampler))
        self.iterator = super().__iter__()

    def __iter__(self) -> Any:
        for _ in range(2):
            yield next(self.iterator)


class Repeated:
    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Any:
        while True:
            yield from self.sampler


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_whose_one_iterator_has_begun_is_refused_before_it_is_changed(workers: int) -> None:
    loader = Endless(batch_size=2, num_workers=workers)
    with pytest.raises(
        UnsupportedSetting, match=r"^Endless takes .* its attribute iterator, .*persistent_workers=True"
    ):
        track(loader)
    assert len([*loader]) == 2
    track(DataLoader(Drawing(), num_workers=workers, persistent_workers=workers > 0))


class Batches(BatchSampler):
    """A sampler whose iterator can be asked for more than indices."""

    def __iter__(self) -> Iterator[list[int]]:
        return Counted(super().__iter__())


class Counted(Iterator[Any]):
    def __init__(self, inner: Iterator[Any]) -> None:
        self.inner, self.taken = inner, 0

    def __next__(self) -> Any:
        found = next(self.inner)
        self.taken += 1
        return found

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken}


class Episodes:
    """Draws each batch when it is asked for, as samplers for few-shot learning and for privacy do."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(6):
            yield torch.randint(SAMPLES, (BATCH,), generator=self.generator).tolist()


@pytest.mark.parametrize(
    ("generator", "draw", "is_mixed"),
    [
        (None, torch.rand, True),
        (None, lambda size: np.random.random(size), False),
        (seeded(1), torch.rand, False),
    ],
    ids=["the training draws too", "it draws from another one", "a generator of its own"],
)
@pytest.mark.parametrize("resumed", [False, True])
def test_batches_that_are_drawn_between_draws_of_the_training_are_refused_within_a_pass(
    generator: torch.Generator | None, draw: Callable[[int], Any], is_mixed: bool, resumed: bool
) -> None:
    def begun(draws: bool) -> tuple[Any, TrackedLoader]:
        tracked = track(made := DataLoader(range(SAMPLES), batch_sampler=Episodes(generator)))  # type: ignore[arg-type]
        for _ in itertools.islice(made, 3):
            if draws:
                draw(1)
        return made, tracked

    if resumed:
        _, former = begun(draws=False)
        made = DataLoader(range(SAMPLES), batch_sampler=Episodes(generator))  # type: ignore[arg-type]
        tracked = track(made)
        tracked.restore(stored(former.position(2)), compares=True)
        for _ in itertools.islice(made, 3):
            draw(1)
    else:
        made, tracked = begun(draws=True)
    if not is_mixed:
        tracked.position(2)
        return
    with pytest.raises(UnsupportedSetting, match=r"^Episodes draws each batch by itself .* a generator of its own"):
        tracked.position(2)
    for _ in made:
        pass
    tracked.position_between()


def test_what_the_iterator_of_a_sampler_can_do_it_can_do_in_a_tracked_loader() -> None:
    """A StatefulDataLoader asks it for its state, and skips what was used."""
    made = DataLoader(Drawing(), batch_sampler=Batches(range(SAMPLES), BATCH, drop_last=False))
    track(made)
    indices = iter(made._index_sampler)
    assert list(itertools.islice(indices, 1, 3)) == [[4, 5, 6, 7], [8, 9, 10, 11]]
    assert indices.state_dict() == {"taken": 3}  # type: ignore[attr-defined]


def test_a_worker_is_initialized_as_the_script_says_and_draws_on_from_where_its_predecessor_was() -> None:
    initialized: list[int] = []

    def initialize(worker: int) -> None:
        initialized.append(worker)
        random.seed(worker)

    state = rng.pack_cpu(rng.capture_cpu())
    expected = drawn()
    init = WorkerInit(initialize, None, makes_batches=True)
    with init.restoring({1: state}):
        init(0)
        init(1)
    assert (initialized, drawn()) == ([0, 1], expected)
    assert init.states == {}, "the next pass starts workers that have no predecessor"
    transform: Any = types.SimpleNamespace(drawn=0)
    init = WorkerInit(None, transform, makes_batches=True)
    changed = [["collate_fn", [[".", "drawn"]], "data", "int", "int", 3]]
    with init.restoring({0: (state, changed)}):
        init(0)
    assert (transform.drawn, drawn()) == (3, expected)


def test_kept_workers_of_a_stream_are_started_again_without_a_trace() -> None:
    """The uninterrupted run only resets them for its next pass; it started them long before."""
    state = rng.pack_cpu(rng.capture_cpu())
    made_at: list[float] = []
    given: list[Any] = []

    def launch() -> tuple[TrackedLoader, Callable[[], Iterator[Any]]]:
        made = DataLoader(Stream(), BATCH, num_workers=2, persistent_workers=True)

        def make() -> Iterator[Any]:
            made_at.append(drawn())
            given.append(sorted(made.worker_init_fn.states))  # type: ignore[union-attr]
            return iter([([1.0], worker, state, None) for worker in range(2)])

        return track(made), make

    first, make = launch()
    assert list(first.iterate(make)) == [[1.0], [1.0]]
    position = stored(first.position_between())
    again, make = launch()
    again.restore(position)
    again.restore_now(process=False)
    torch.manual_seed(9)
    passing = again.iterate(make)
    after = torch.rand(())
    torch.manual_seed(9)
    assert after == torch.rand(()) and list(passing) == [[1.0], [1.0]]
    assert made_at[0] == made_at[1]
    assert given == [[], [0, 1]]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"batch_size": 5}, "batch size 4, this launch has 5"),
        ({"num_workers": 1}, "num_workers 0, this launch has 1"),
        ({"dataset": range(9)}, "a dataset of length 22, this launch has 9"),
        ({"dataset": Stream()}, "a dataset of length 22, this launch has None"),
    ],
)
def test_another_loader_is_refused_with_what_differs(other: Any, words: str) -> None:
    made, tracked = started("in order", 1)
    rows(itertools.islice(made, 2))
    with pytest.raises(StateMismatch, match=words):
        track(DataLoader(**{"dataset": Drawing(), "batch_size": BATCH, **other})).restore(tracked.position(2))


class Batch:
    """A batch that is not made of data: it has no digest."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples


def test_a_prefetched_batch_without_a_digest_comes_back_unverified() -> None:
    torch.manual_seed(3)
    made = DataLoader(Drawing(), BATCH, shuffle=True, collate_fn=Batch)
    tracked = track(made)
    passing = iter(made)
    batches = [next(passing) for _ in range(3)]
    position = tracked.position(2)
    expected = [batches[2].samples, *(batch.samples for batch in passing)]
    again = DataLoader(Drawing(), BATCH, shuffle=True, collate_fn=Batch)
    track(again).restore(position)
    assert position.prefetched == 1 and tree_of(position.proof) is None
    assert [batch.samples for batch in again] == expected


def test_a_generator_of_a_sampler_that_was_replaced_is_found() -> None:
    made = DataLoader(range(SAMPLES), batch_sampler=BatchSampler(range(SAMPLES), BATCH, drop_last=False))
    tracked = track(made)
    assert not tracked.position_between().generators
    made.batch_sampler.sampler = RandomSampler(range(SAMPLES), generator=torch.Generator())  # type: ignore[union-attr]
    assert list(tracked.position_between().generators) == ["batch_sampler/sampler"]


def test_a_loader_that_has_begun_its_first_pass_already_gives_it_as_it_was() -> None:
    """A StatefulDataLoader begins it when it is first asked for its state."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> Any:
        torch.manual_seed(4)
        made = stateful.StatefulDataLoader(range(SAMPLES), BATCH, shuffle=True)
        random_state = LoaderRandomState(made).capture()
        made.state_dict()
        return made, random_state

    bare, _ = make()
    expected = [batch.tolist() for batch in bare]
    made, random_state = make()
    made.resume_made = AlreadyMade(random_state, [])
    track(made)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    passing = iter(made)
    assert torch.equal(torch.get_rng_state(), before)
    assert [batch.tolist() for batch in passing] == expected
    made, _ = make()
    with pytest.raises(UnsupportedSetting, match="has begun its first pass already"):
        track(made)


def test_a_first_pass_that_was_begun_keeps_the_sampler_that_was_replaced_since() -> None:
    """With workers, which fetch at once; Accelerate then gives the loader its seedable sampler. So does its resume."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> Any:
        torch.manual_seed(4)
        made = stateful.StatefulDataLoader(range(SAMPLES), BATCH, shuffle=True, num_workers=1)
        random_state = LoaderRandomState(made).capture()
        made.state_dict()
        samplers = [(made.batch_sampler, made.batch_sampler.sampler)]
        made.batch_sampler.sampler = torch.utils.data.SequentialSampler(range(SAMPLES))
        return made, AlreadyMade(random_state, samplers)

    bare, _ = make()
    expected = [[batch.tolist() for batch in bare] for _ in range(2)]
    assert expected[0] != expected[1] == [list(range(SAMPLES))[at : at + BATCH] for at in range(0, SAMPLES, BATCH)]
    made, made.resume_made = make()
    tracked = track(made)
    batches = iter(made)
    first = [next(batches).tolist() for _ in range(3)]
    position = tracked.position(2)
    again, again.resume_made = make()
    track(again).restore(position)
    for rest, seen in ((batches, expected[0][:3]), (iter(again), expected[0][:2])):
        assert seen + [batch.tolist() for batch in rest] == expected[0]
    assert first == expected[0][:3]
    assert [batch.tolist() for batch in made] == [batch.tolist() for batch in again] == expected[1]


def dispatcher() -> types.SimpleNamespace:
    return types.SimpleNamespace(slice_fn=lambda batch, at: batch[at], end_of_dataloader=False)


def test_the_slice_that_fills_up_the_last_batch_comes_back() -> None:
    """A loader that fetches for all cuts it from its first batch: once in each pass, whatever it cuts after that."""
    made, tracked = started("in order", 1)
    dispatching = dispatcher()
    first = FirstSlice(dispatching, tracked)
    rows(itertools.islice(made, 1))
    assert [first([1, 2], 0), first([3, 4], 1)] == [1, 4] and first.kept == 1
    dispatching.end_of_dataloader = True
    assert first.is_through() and first.kept is None, "the next pass has a first batch of its own"
    dispatching.end_of_dataloader = False
    rows(made)
    assert first([5, 6], 1) == 6 and first.kept == 6
    made, tracked = started("in order", 1)
    resumed = FirstSlice(dispatcher(), tracked)
    resumed.restore(1)
    rows(itertools.islice(made, 1))
    assert [resumed([3, 4], 0), resumed([3, 4], 1)] == [1, 4]
    rows(made)
    assert resumed([7, 8], 0) == 7


def test_who_fetches_for_a_loader_that_gives_batches_to_all_ranks() -> None:
    ranks: list[Any] = [types.SimpleNamespace(world_size=3, rank=rank) for rank in range(3)]
    assert [fetches_per_batch(each, splits=False) for each in ranks] == [3, 0, 0], "a batch for every rank"
    assert [fetches_per_batch(each, splits=True) for each in ranks] == [1, 1, 1], "each is a piece of one batch"


def test_a_copy_of_a_tracked_loader_is_not_tracked() -> None:
    """It has the functions that the loader had, and reads what the loader reads."""

    def init(worker: int) -> None:
        pass

    loader = DataLoader(range(6), batch_size=2, num_workers=1, collate_fn=list, worker_init_fn=init)
    track(loader)
    copied = copy.deepcopy(loader)
    assert type(copied) is DataLoader and not hasattr(copied, "resume_tracked")
    assert (copied.collate_fn, copied.worker_init_fn) == (list, init)
    assert list(copied) == list(loader) == [[0, 1], [2, 3], [4, 5]]

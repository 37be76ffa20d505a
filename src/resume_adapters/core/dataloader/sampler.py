"""The index sampler of a tracked loader, and the generators that belong to the loader and its samplers."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any, NamedTuple

from resume_adapters.core.observed.loaders import ROW_OF_SAMPLER, LoaderAttributes, begins_itself, require_changes
from resume_adapters.core.state import encoding, rng


class LoaderRandomState:
    """What shapes a loader's order: the CPU's generators, those that belong to the loader, what its samplers hold.

    Args:
        loader: a ``torch.utils.data.DataLoader``.
        attributes: those of its samplers; ``None`` for a loader that is not tracked.
    """

    def __init__(self, loader: Any, attributes: LoaderAttributes | None = None) -> None:
        self._loader = loader
        self._attributes = attributes

    def capture(self) -> dict[str, Any]:
        """Return the current state."""
        state: dict[str, Any] = {"cpu": rng.cpu_to_tree(rng.capture_cpu()), "generators": self.generators()}
        if self._attributes is not None:
            self._attributes.look()
            if attributes := self._attributes.capture():
                state["attributes"] = attributes
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`capture` returned."""
        rng.restore_cpu(rng.cpu_from_tree(state["cpu"]))
        self.restore_generators(state["generators"])
        if self._attributes is not None:
            self._attributes.restore(state.get("attributes", []))

    def generators(self) -> dict[str, Any]:
        """Return the state of the loader's own generators, by the path at which each was found."""
        return {path: generator.get_state() for path, generator in _own_generators(self._loader).items()}

    def places(self) -> set[Any]:
        """Return where the loader's own generators are."""
        return {id(each) for each in _own_generators(self._loader).values()}

    def restore_generators(self, states: dict[str, Any], without: Set[Any] = frozenset()) -> None:
        """Restore what :meth:`generators` returned; one that was not there then, or is in a place without, stays."""
        known = {**{_undealt(path): state for path, state in states.items()}, **states}
        for path, generator in _own_generators(self._loader).items():
            state = known.get(path, known.get(_undealt(path)))
            if state is not None and id(generator) not in without:
                generator.set_state(state)


def require_state(state: dict[str, Any]) -> None:
    """Try what :meth:`LoaderRandomState.capture` returned; what it raises says what is wrong."""
    rng.require_cpu(rng.cpu_from_tree(state["cpu"]))
    rng.require_generators(state["generators"])
    for name in ("attributes", "content"):
        require_changes(state.get(name, []))


def require_began_with(state: dict[str, Any]) -> None:
    """Try what :meth:`TrackedSampler.began_with` returned, likewise."""
    require_state(state["iter"])
    if state["first"] is not None:
        require_state(state["first"])


class TrackedSampler:
    """The index sampler of a tracked loader: keeps the random state at the start of a pass, and skips on resume.

    Args:
        random_state: the random state of the loader.

    Attributes:
        after_first: the random state after the first index of a resumed pass.
        on_resumed: is called when a pass that resumes has drawn again what it had drawn.
        on_number: is called with one batch of indices of each pass, before its samples are fetched.
        number: that batch is the one of this number, among those that are not skipped; at least 1.
        draws: the order was drawn from the random state of the process, or no pass has shown where from.
        is_mixed: the batches of this pass are drawn from that state one by one, and others have drawn between them: no
            resume can draw the same ones again.
    """

    def __init__(self, random_state: LoaderRandomState, inner: Any) -> None:
        self.after_first: dict[str, Any] | None = None
        self.on_resumed: Callable[[], None] = _do_nothing
        self.on_number: Callable[[Any], None] = lambda indices: None
        self.number = 1
        self.draws = True
        self.is_mixed = False
        self._random_state = random_state
        self._inner = inner
        self._at_iter: dict[str, Any] | None = None
        self._at_first: dict[str, Any] | None = None
        self._resume: tuple[int, dict[str, Any] | None] | None = None
        self._is_mid_pass = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __len__(self) -> int:
        return len(self._inner)

    @property
    def name(self) -> str:
        """The class of the sampler that makes the order."""
        inner = self._inner
        while hasattr(inner, "sampler"):
            inner = inner.sampler
        return type(inner).__name__

    def began_with(self) -> dict[str, Any] | None:
        """Return the random state with which this pass began; ``None`` if no index was asked for.

        Samplers draw their order at one of two moments: ``"iter"``, when ``iter`` was called, and ``"first"``, when the
        first index was asked for.
        """
        return None if self._at_first is None else {"iter": self._at_iter, "first": self._at_first}

    def resume_at(self, skip: int, began_with: dict[str, Any] | None, *, is_mid_pass: bool = True) -> None:
        """Resume a pass with the next one.

        Args:
            skip: batches of indices to skip.
            began_with: what :meth:`began_with` returned; ``None`` for the current random state. Where ``"first"`` is
                ``None``, it is the state after ``iter``.
            is_mid_pass: the pass resumes in its middle. One that is at its start draws its order, and then its first
                batch, from one random state.
        """
        self._resume = (skip, began_with)
        self._is_mid_pass = is_mid_pass
        self.after_first = None

    def forget(self) -> None:
        """Undo :meth:`resume_at` where no index was asked for: the pass was resumed at its very end."""
        self._resume = None

    def __iter__(self) -> Iterator[Any]:
        self.is_mixed = False
        # Some samplers draw their order here and some at the first index, so the state at both is kept and restored.
        if self._resume is None or self._resume[1] is None:
            self._at_iter = self._random_state.capture()
            inner = iter(self._inner)
            self.draws = _has_drawn_since(self._at_iter)
            return _Indices(self._run(inner, None), inner)
        now = self._random_state.capture()
        self._at_iter = self._resume[1]["iter"]
        self._random_state.restore(self._at_iter)
        inner = iter(self._inner)
        after_iter = self._random_state.capture()
        self.draws = _has_drawn_since(self._at_iter)
        self._random_state.restore(now)
        return _Indices(self._run(inner, after_iter), inner)

    def _run(self, inner: Iterator[Any], after_iter: dict[str, Any] | None) -> Iterator[Any]:
        (skip, began_with), self._resume = self._resume or (0, None), None
        if began_with is None:
            self._at_first = self._random_state.capture()
            yield from self._told(self._watched(itertools.islice(inner, skip, None)), self.number)
            return
        now = rng.capture_cpu()
        self._at_first = began_with["first"] or after_iter
        assert self._at_first is not None
        self._random_state.restore(self._at_first)
        collections.deque(itertools.islice(inner, skip), maxlen=0)
        self.on_resumed()  # before the next, with which some draw once more: the order is through
        self.on_resumed = _do_nothing
        indices = self._watched(inner)
        first = next(indices, None)
        self.after_first = self._random_state.capture()
        if self._is_mid_pass:  # the sampler drew its numbers at the start of the pass; the batch draws its own here
            rng.restore_cpu(now)
        if first is not None:
            yield first
            yield from self._told(indices, self.number - 1)

    def _watched(self, indices: Iterator[Any]) -> Iterator[Any]:
        """Yield batches of indices, and look whether the first one was drawn from the random state of the process."""
        for each in itertools.islice(indices, 1):
            self.draws |= _has_drawn_since(self._at_first)
            left = _drawn_from()
            yield each
            yield from self._one_by_one(indices, left)

    def _one_by_one(self, indices: Iterator[Any], left: dict[str, str | None]) -> Iterator[Any]:
        """Yield further batches of indices; look, while each is drawn by itself, whether others draw between them."""
        before = _drawn_from()
        for each in indices:
            after = _drawn_from()
            drawn = [name for name in after if after[name] != before[name]]
            self.is_mixed = any(before[name] != left[name] for name in drawn)
            yield each
            if self.is_mixed or not drawn:
                break
            left, before = after, _drawn_from()
        yield from indices

    def _told(self, indices: Iterator[Any], number: int) -> Iterator[Any]:
        """Yield batches of indices, and tell of that of a number before."""
        yield from itertools.islice(indices, number)
        for each in indices:
            self.on_number(each)
            yield each
            break
        yield from indices


def _has_drawn_since(state: dict[str, Any] | None) -> bool:
    assert state is not None, "the moment was captured"
    return encoding.digest_of(rng.cpu_to_tree(rng.capture_cpu())) != encoding.digest_of(state["cpu"])


def _drawn_from() -> dict[str, str | None]:
    """Return a digest of each random state of the process from which an order may be drawn."""
    return {name: encoding.digest_of(each) for name, each in rng.cpu_to_tree(rng.capture_cpu()).items()}


def _do_nothing() -> None:
    """No-op, where nothing else is to be restored."""


class _Indices:
    """One pass over the indices; other attributes are those of the sampler's own iterator, such as its state."""

    def __init__(self, run: Iterator[Any], inner: Iterator[Any]) -> None:
        self._run = run
        self._inner = inner

    def __iter__(self) -> _Indices:
        return self

    def __next__(self) -> Any:
        return next(self._run)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


_HELD = ("sampler", "batch_sampler")
_WRAPPED = (*_HELD, "dataset._sampler")
"""Where a loader and a sampler keep another; the last is where Lightning keeps one that it divides among ranks."""

_DEPTH = 4
"""How deep nested samplers are searched; the limit ends the search of a sampler that holds itself."""


def samplers_of(loader: Any) -> dict[str, Any]:
    """Return the samplers of a loader, and those nested in them, by path."""
    return dict(_samplers(loader, _HELD, "", _DEPTH))


def _undealt(path: str) -> str:
    """Return the path of a sampler without what deals it out: several ranks have a wrapper that a single one lacks."""
    return path.replace("batch_sampler/batch_sampler", "batch_sampler").replace("/dataset._sampler", "")


def renamed(state: dict[str, Any] | None, samplers: Mapping[str, Any], name: str = "attributes") -> Any:
    """Return a state with the attributes of samplers at the paths that these have in this launch.

    Args:
        samplers: the loader's, by path.
        name: of the attributes in the state.
    """
    here = {**{_undealt(path): path for path in samplers}, **{path: path for path in samplers}}
    saved = (state or {}).get(name, [])
    attributes = [[here.get(root, here.get(_undealt(root), root)), *rest] for root, *rest in saved]
    return {**state, name: attributes} if state and attributes else state


class DealtOrder(NamedTuple):
    """One order of samples, which all ranks know and take their samples of by turns.

    Whatever their number, the samples that they have used together are the first ones of it.

    Attributes:
        name: the sampler that makes it, with what it follows from.
        turns: the ranks that take turns.
        size: its length.
    """

    name: str
    turns: int
    size: int


def turns(sampler: Any) -> int:
    """Return how many ranks take turns at what a sampler yields, or wraps; with split batches each takes its piece."""
    splits = getattr(sampler, "split_batches", False) is True  # Accelerate's BatchSamplerShard
    numbers: list[Any] = [getattr(sampler, name, None) for name in ("num_processes", "num_replicas")]
    return next((each for each in numbers if hasattr(type(each), "__index__") and not splits), 1)


def dealt_order(loader: Any) -> DealtOrder | None:
    """Return the order that the samplers of a loader deal out; ``None`` where one of them may do something else."""
    from torch.utils.data import BatchSampler, DistributedSampler

    outer = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    found = [outer, *(each for _, each in _samplers(outer, _WRAPPED, "", _DEPTH))]
    chain = list({id(each): each for each in reversed(found)}.values())[::-1]  # a wrapper may hold an inner one, too
    batching = [each for each in chain if getattr(type(each), "__iter__", None) is BatchSampler.__iter__]
    sharding = [each for each in chain if isinstance(getattr(each, "split_batches", None), bool)]
    dealing = [
        each
        for each in chain
        if isinstance(each, DistributedSampler)
        and (type(each).__iter__ is DistributedSampler.__iter__ or hasattr(each.dataset, "_sampler"))  # Lightning's
    ]
    makes, known = chain[-1], [*batching, *sharding, *dealing]
    if not batching or any(each not in known for each in chain[:-1]) or (turns(makes) > 1 and makes not in dealing):
        return None
    names = [_name(each) for each in dealing if each.shuffle]
    if makes not in dealing:
        names.append(_name(makes))
    size = length_of(makes.dataset if makes in dealing else makes)
    if size is None:
        return None
    name = " of ".join(names) or "SequentialSampler()"
    return DealtOrder(name, math.prod(map(turns, chain)), size)


def _name(sampler: Any) -> str:
    """Return the class of a sampler and what its order follows from."""
    names = [name for name in ("seed", "initial_seed", "batch_size", "replacement") if hasattr(sampler, name)]
    given = [f"{name}={getattr(sampler, name)}" for name in names]
    if getattr(sampler, "generator", None) is not None and "initial_seed" not in names:
        given.append("generator")
    return f"{type(sampler).__name__}({', '.join(given)})"


def order_of(loader: Any) -> LoaderAttributes:
    """Return what a loader's order follows from: its samplers, and a loader that begins its passes in its own way."""
    roots = {**samplers_of(loader), **({"loader": loader} if begins_itself(loader) else {})}
    without = [loader.dataset]  # a sampler may hold the dataset
    return LoaderAttributes(roots, without=without, longest_row=ROW_OF_SAMPLER)


def _own_generators(loader: Any) -> dict[str, Any]:
    """Return the ``torch.Generator`` objects of a loader and its samplers, by the path at which each is found first."""
    found: dict[str, Any] = {}
    for path, holder in [("loader", loader), *_samplers(loader, _HELD, "", _DEPTH)]:
        generator = getattr(holder, "generator", None)
        if hasattr(generator, "get_state") and not any(generator is other for other in found.values()):
            found[path] = generator
    return found


def _samplers(holder: Any, attributes: tuple[str, ...], path: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield the samplers of a loader or a sampler, and those nested in them, each after its path."""
    for attribute in attributes if depth else ():
        inner = holder
        for name in attribute.split("."):
            inner = getattr(inner, name, None)
        if inner is not None:
            yield f"{path}{attribute}", inner
            yield from _samplers(inner, _WRAPPED, f"{path}{attribute}/", depth - 1)


def length_of(thing: Any) -> int | None:
    """Return the length of a dataset, a sampler or a loader; ``None`` where it has none."""
    try:
        return len(thing)
    except Exception:  # of any kind: a sampler that has none says so in its own words
        return None

"""The passes of a hand-written loop over its training loaders: which are open, and what is left of each."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import GeneratorType
from typing import Any

from resume_adapters.core.dataloader.instrument import watched
from resume_adapters.core.loop.framework import LoopFramework
from resume_adapters.core.loop.loader import LoaderForm, LoopLoader, PassState, count_alike
from resume_adapters.core.loop.windows import TakenAhead
from resume_adapters.core.observed.instances import instances
from resume_adapters.core.session.rescale import SEVERAL_LOADERS
from resume_adapters.core.session.session import Session
from resume_adapters.errors import UnsupportedSetting

_begun_with: weakref.WeakSet[Any] = weakref.WeakSet()
"""The loaders that there were when the runs of this process began."""


class EpochPasses:
    """The passes of a loop, numbered within their epoch in the order in which the script begins them.

    Those that begin beside an open one, in its body or together with it, have its number: a resume begins the passes
    before it again, which yield nothing then, but not those that have ended beside it.

    Args:
        framework: the framework's side of the loop.

    Attributes:
        begun: passes of this epoch that the script has begun, but for those beside another.
        is_in_steps: the loop has no epochs, whose passes a resume would begin again.
        open: the passes that the script is within, the first of which leads the others.
        external: the loader that the script iterates over itself; ``None`` in a wrapped loop.
        handed: batches that the script was given since :meth:`take`; of passes together, by the first.
        ahead: those that the script has taken, and not used.
    """

    def __init__(self, framework: LoopFramework, session: Session) -> None:
        self.begun = self.handed = 0
        self.ahead = TakenAhead()
        self._framework = framework
        self._session = session
        self._epoch = 0
        self._loaders: list[LoopLoader] = []
        self.open: list[LoopLoader] = []
        self._left: list[tuple[LoopLoader, int | None]] = []
        self.external: LoopLoader | None = None
        self._saved: Sequence[PassState] = ()
        self._paired: dict[int, LoopLoader | None] = {}
        self.is_in_steps = False
        self._together: list[LoopLoader] = []
        self._again = self._saved_epoch = 0
        self._existing: weakref.WeakSet[Any] = weakref.WeakSet()
        self._of_former_runs = _begun_with.copy()

    def begin_loop(self) -> None:
        """Remember which loaders there are: one that is made within the loop may be made again for each pass."""
        from torch.utils.data import DataLoader

        self._existing = weakref.WeakSet(instances(DataLoader))
        _begun_with.update(self._existing)

    def _made_in_loop(self, loader: LoopLoader) -> bool:
        own = (loader.prepared, loader.tracked.loader)  # an elastic one has been replaced by another
        return not (loader.is_kept or any(each in self._existing for each in own))

    def has(self, loader: Any) -> bool:
        """Return whether a loader was given to the loop: as the script has it, or the torch loader beneath."""
        return any(loader is each.prepared or loader is each.tracked.loader for each in self._loaders)

    # ---- One pass

    def begin(self, prepared: Any, limit: int | None = None) -> LoopLoader | None:
        """Begin the next pass of the epoch over a loader; return ``None`` if a checkpoint was taken after that pass.

        Args:
            prepared: the loader, as the script has it.
            limit: batches after which the pass is over.

        Raises:
            StateMismatch: the loader has a different dataset, batch size or number of workers than when it was saved.
        """
        is_beside, is_again = self._is_within, self._begins_again
        number = self.begun - is_beside
        loader = self._loader(prepared, number)
        self.begun += not is_beside
        if is_again:
            return None
        self._left = []
        if not loader.is_paired and self._made_in_loop(loader):
            self._forget_former(number)
        if not self.open:
            self.ahead.begin_pass()
        if not is_beside:
            self._together = [loader, *self.open]
            for each in self.open:  # an endless iterator over another loader
                each.reopen(number)
        if loader.goes_on and self.open:
            loader.tracked.keep_random_state()
        loader.begin(number, self._epoch, limit)
        self._loaders.remove(loader)
        self._loaders.append(loader)  # the one that was used last is the last
        self._together = list(dict.fromkeys([*self._together, loader]))
        self.open = [each for each in self._together if each in self.open or each is loader]
        return loader

    @property
    def _is_within(self) -> bool:
        """Whether the pass is open that the others of :attr:`_together` have begun beside."""
        return self._together[:1] == self.open[:1] != []

    @property
    def _begins_again(self) -> bool:
        """Whether the pass that begins next had ended before those that were open when the checkpoint was taken."""
        return self.begun < self._again and not self._is_within

    @property
    def again(self) -> int:
        """The passes that a resume begins again."""
        return 0 if self.is_in_steps else self.begun - self._is_within

    @property
    def go_on(self) -> bool:
        """Whether the checkpoint was taken within a pass."""
        return any(each.number is not None for each in self._saved)

    @property
    def next_goes_on(self) -> bool:
        """Whether it was taken within the pass that begins next."""
        left = [each for index, each in enumerate(self._saved) if index not in self._paired]
        return not self._begins_again and any(each.number is not None for each in left)

    def skip(self, loader: LoopLoader) -> None:
        """Leave out a pass of which every batch was used before the checkpoint."""
        loader.tracked.restore_now()
        self._framework.skip_pass(loader.prepared, is_left=loader.is_at_limit)

    def begins_round(self, loader: LoopLoader) -> bool:
        """Return whether this loader, of those that are iterated together, is the first.

        Raises:
            UnsupportedSetting: its pass was begun in an epoch that is over.
        """
        if loader not in self.open:
            raise UnsupportedSetting(
                "a pass over a loader continues in the next epoch, where a relaunch would begin a new pass: call "
                "run.batches(loader) in each epoch, or loop over run.steps(n), without epochs"
            )
        return self.open[0] is loader

    def leave(self, loader: LoopLoader) -> None:
        """Remember which passes are open when the script leaves one early, and where."""
        if loader in self.open:  # not with its epoch
            loader.leave()
        self._left = self._left or [(each, each.number) for each in self.open]

    def reopen(self) -> None:
        """Open the passes again that the script left with their epoch: a longer run goes on in the middle of it."""
        for loader, number in self._left:
            loader.reopen(number)
            self.open.append(loader)
        self._together = list(self.open)

    def end(self, loader: LoopLoader) -> None:
        """End a pass."""
        loader.end()
        if loader in self.open:
            self.open.remove(loader)

    def end_epoch(self) -> None:
        """Begin to number the passes of the next epoch; those that the script still holds are over."""
        for loader in self.open:
            loader.leave()
            loader.end()
        self.ahead.begin_pass()
        self.begun = self._again = 0
        self._epoch += 1
        self.open, self._left = [], []
        self._saved = [each.over() for each in self._saved]
        for index, paired in self._paired.items():
            if paired is not None and paired.goes_on:  # it was recognised by an earlier pass
                self._restore(paired, index)

    @property
    def are_known(self) -> bool:
        """Whether any loader was given to the loop, in this launch or before."""
        return bool(self._loaders or self._saved)

    def require_same_topology(self) -> None:
        """Refuse a different number of ranks where no loader was given: the random state of each says what follows.

        Raises:
            StateMismatch: it is different.
        """
        context, changes = self._session.context, self._session.loaders.topology_changes
        if context is not None and changes and not self.are_known:
            raise context.mismatch(changes, "the data come from no loader, and what each process draws depends on it")

    @property
    def fraction(self) -> float:
        """The fraction of the epoch that is done, by the first open loader; 0.0 where its length is not known."""
        done, end = self.reached()
        return done / end if end else 0.0

    def reached(self) -> tuple[int, int | None]:
        """Return the batches of the running pass that are done, and those after which it is over, where it is known.

        With several it is the pass over the first open loader; outside of a pass, one batch is left.
        """
        loader = self.external or (self.open[0] if self.open else None)
        return (0, 1) if loader is None else (loader.done, loader.end_of_pass)

    # ---- Where the loop cannot be wrapped

    def track_external(self, prepared: Any, begin_epoch: Callable[[], object]) -> None:
        """Track a loader that the script iterates over itself; its first pass yields what is left.

        Args:
            prepared: the loader, as the script has it.
            begin_epoch: called when a pass after the first begins.

        Raises:
            StateMismatch: the loader has a different dataset, batch size or number of workers than when it was saved.
            UnsupportedSetting: the script follows another one.
        """
        if self.external is not None and self.external.prepared is prepared:
            return
        if self.external is not None:
            raise UnsupportedSetting(
                "run.resume() follows one loader, and was given a second loader: give both to run.batches(), in "
                "run.epochs() or run.steps()"
            )
        loader = self.external = self._loader(prepared, 0)
        trace = self._session.trace

        def taken(batch: Any, number: int) -> None:
            if number == 0 and not self.ahead.left:
                self.ahead.begin_pass()
            if loader.hand_out(number):
                begin_epoch()
            self.handed += 1
            if trace is not None:
                trace.add_batch(batch)

        watching = contextlib.ExitStack()
        watching.enter_context(watched(prepared, taken))
        self._session.run.undo_at_close(watching.close)
        if loader.at_end:
            loader.tracked.resume_at_end()
            self._framework.skip_pass(prepared, is_iterated=True)

    @property
    def is_ahead(self) -> bool:
        """Whether the script has taken batches that are not done, and cannot take again."""
        if self.external is not None and (self.handed or self.external.done < 0):
            return True
        return self.ahead.must_wait or (self.ahead.left > 0 and not (self.open or self.external))

    def take(self) -> int:
        """Return the batches that were used since the last call: with no loader, a call counts as one."""
        loaders = self.open if self.external is None else [self.external]
        batches, self.handed = self.handed, 0
        if not self.are_known:
            return 1
        used = self.ahead.add(batches, is_last=not loaders or loaders[0].is_handed_out)
        for each in loaders:
            if not each.follows:
                each.done = each.consumed - self.ahead.left
        return used

    def hand(self, loader: LoopLoader) -> None:
        """Hand a batch of a pass to the script."""
        leads = self.external is None and self.open[:1] == [loader]
        if loader.follows is None:
            loader.follows = not (leads or self.handed)
        if loader.follows:
            loader.done = loader.consumed
        self.handed += leads

    # ---- In a checkpoint

    def states(self, process: Mapping[str, Any]) -> list[PassState]:
        """Return where each loader is, with those that this launch has not come to yet.

        Args:
            process: the current random state of the process, as a tree.
        """
        unseen = [state for index, state in enumerate(self._saved) if index not in self._paired]
        closed = [each for each in self._loaders if each not in self.open]
        return [*unseen, *(self._state(loader, process) for loader in (*closed, *self.open))]

    def _state(self, loader: LoopLoader, process: Mapping[str, Any]) -> PassState:
        return loader.state(
            self._session.loaders,
            process,
            self._framework.passes_begun(loader.prepared),
            self._forms_beside(loader),
            made_in_loop=self._made_in_loop(loader),
        )

    def restore(self, loaders: Sequence[PassState], again: int, epoch: int) -> int:
        """Restore the passes, each loader when the script comes to it.

        Args:
            loaders: what :meth:`states` returned.
            again: what :attr:`again` was; in a checkpoint of an older version, the passes that had begun.
            epoch: the epoch in which it was saved.

        Returns:
            The batches that are done of the first pass that was open.
        """
        self._saved, self._saved_epoch = loaders, epoch
        self._again = min([again, *(each.number for each in loaders if each.number is not None)])
        if len(loaders) > 1:
            self._session.rescale.forbid(SEVERAL_LOADERS)
        return next((each.consumed for each in loaders if each.number is not None), 0)

    def restore_foreign(self, consumed: int) -> None:
        """Begin the first pass after some batches; nothing more is known."""
        self._saved = [PassState(position=None, consumed=consumed, global_batch=0, samples=0, number=0)]

    # ---- Which saved loader is which

    def _loader(self, prepared: Any, number: int) -> LoopLoader:
        loader = next((known for known in self._loaders if known.prepared is prepared), None)
        if loader is None:
            if isinstance(prepared, GeneratorType):
                raise UnsupportedSetting(
                    "run.batches() was given a generator, whose position nobody can save: give it the DataLoader, and "
                    "the generator what it returns, as in cycle(run.batches(loader)), or let an IterableDataset yield "
                    "the batches"
                )
            loader = self._framework.track(prepared, self._session)
            self._loaders.append(loader)
        index = None if loader.is_paired else self._match(loader, number)
        if index is not None:
            self._paired[index] = loader
            self._restore(loader, index)
        return loader

    def _match(self, loader: LoopLoader, number: int) -> int | None:
        """Return which saved state a loader continues that begins pass ``number``; ``None`` where it is a new one.

        An open pass says it. Elsewhere it is the loader that was used for such a pass and has waited longest, unless
        the script makes new loaders; or else one that has all that tells loaders apart.
        """
        made_in_loop = self._made_in_loop(loader)
        left = [(index, each) for index, each in enumerate(self._saved) if index not in self._paired]
        for index, each in left:
            goes_on = each.number is not None and (number == self._again or self._is_within)
            if goes_on and not (self._is_within and self._is_of_another(each, loader)):
                return index
        for index, each in left:
            if each.numbers is None:  # of a version that paired by the order of first use
                return index
        alike = [one for one in left if one[1].made_in_loop == made_in_loop and (one[1].is_reused or not made_in_loop)]
        for index, each in alike:
            if number in (each.numbers or ()) and not self._is_of_another(each, loader):
                return index
        form = LoaderForm.of(loader.tracked.loader)
        return next((index for index, each in alike if each.position and all(form.fits(each.position))), None)

    def _is_of_another(self, saved: PassState, loader: LoopLoader) -> bool:
        """Return whether a saved state belongs to another loader than one that does not fit it.

        Where as many others fit it as when it was saved, the loader that it was saved of is still one of them. Where
        they are fewer, that loader has changed, and is this one: loaders that are only evaluated may fit, too.
        """
        assert saved.position is not None, "a loader that was numbered has a position"
        known = saved.alike or [1, 1]
        fits = LoaderForm.of(loader.tracked.loader).fits(saved.position)
        alike = count_alike(self._forms_beside(loader), saved.position)  # this one included
        return any(not fit and found > before for fit, found, before in zip(fits, alike, known, strict=True))

    def _forms_beside(self, loader: LoopLoader) -> list[LoaderForm]:
        """Return the forms of the other loaders that existed when the loop began, as far as they still exist."""
        own = (loader.prepared, loader.tracked.loader)
        others = [each for each in self._existing if each not in self._of_former_runs]
        return [LoaderForm.of(each) for each in others if all(each is not mine for mine in own)]

    def _forget_former(self, number: int) -> None:
        """Forget loaders that were made within the loop for one such pass: another one is made for each."""
        self._loaders = [
            each
            for each in self._loaders
            if each.number is not None or each.is_reused or number not in each.numbers or not self._made_in_loop(each)
        ]
        self._paired |= {
            index: None
            for index, each in enumerate(self._saved)
            if each.made_in_loop and not each.is_reused and each.number is None and number in (each.numbers or [])
        }

    def _restore(self, loader: LoopLoader, index: int) -> None:
        session = self._session
        assert session.context is not None, "a loader was saved"
        loader.restore(
            session.context,
            session.loaders,
            self._saved[index],
            self._saved_epoch,
            lambda state: state.loaders[index],
        )
        passes = self._saved[index].begun
        if passes is not None:  # of a pass that goes on, the beginning is counted again
            self._framework.restore_passes(loader.prepared, passes - (self._saved[index].number is not None))
        session.move_schedules()
        begun = session.rescale.take_begun()
        if begun:
            self._framework.skip_micro_batches(begun)

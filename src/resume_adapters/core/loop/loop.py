"""A hand-written training loop that resumes: its epochs and its batches are wrapped, and it calls :meth:`step`.

After a kill the loop needs no branch: :meth:`ResumableLoop.epochs` and :meth:`ResumableLoop.batches` yield what is
left. A checkpoint is taken at the end of the body of the outermost wrapped loop, wherever it was asked for. So all that
the body does after its step (an evaluation, a log line) comes before the checkpoint, and never half of it.

An adapter derives a :class:`LoopFramework`, which finds the loader beneath what its framework wraps around it, lets the
framework write and load its own files, and knows when an optimizer step was taken.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Mapping
from types import TracebackType
from typing import Any

from resume_adapters.core.loop.asked import AskedSaves
from resume_adapters.core.loop.checkpointing import LoopCheckpointing, LoopRankState
from resume_adapters.core.loop.framework import LoopFramework, Resumed
from resume_adapters.core.loop.guard import LoopGuard
from resume_adapters.core.loop.loader import Batches, LoopLoader
from resume_adapters.core.loop.windows import other_window
from resume_adapters.core.run.run import ResumableRun
from resume_adapters.core.run_directory.status import RunState
from resume_adapters.core.session.finished import Extent
from resume_adapters.core.session.options import ResumeOptions
from resume_adapters.core.session.rescale import GIVEN_IN_STEPS, Rescale
from resume_adapters.core.session.session import Session
from resume_adapters.errors import UnsupportedSetting


class ResumableLoop:
    """A training loop that goes on where its last checkpoint was taken.

    Args:
        framework: the framework's side of it.
        run: the run, not yet opened.
        options: the options of the run.
        each_epoch: save at the end of each epoch, beside what the run's cadence says.

    Attributes:
        epoch: the epoch that is running, from 0.
        global_step: optimizer steps completed.
    """

    def __init__(
        self, framework: LoopFramework, run: ResumableRun, options: ResumeOptions, *, each_epoch: bool
    ) -> None:
        self.epoch = 0
        self.global_step = 0
        self._framework = framework
        self._run = run
        rescale = Rescale(
            options.on_batch_change,
            framework.about.accumulation,
            accumulates_across_epochs=framework.about.accumulates_across_epochs,
        )
        self._session = Session(run, framework, options, LoopRankState, rescale)
        self._checkpointing = LoopCheckpointing(framework, self._session)
        self._passes = self._checkpointing.passes
        self._metrics = self._checkpointing.metrics
        self._windows = self._checkpointing.windows
        self._guard = LoopGuard(framework.trained, framework.about.registers, options.parts, self._passes.has)
        run.undo_at_close(self._guard.close)
        self._each_epoch = each_epoch
        self._resumed: Resumed | None = None
        self._extent = Extent(None, None)
        self._due = self._is_due_in_memory = self._is_asked = False
        self._holds = self._checkpointing.holds
        self._asked = AskedSaves()
        if run.ranks.world_size > 1 and not self._holds:  # a restartable block notices by itself
            run.steps.duties["tell who waits for a save"] = self._asked.look
        self._has_moved = False
        self._is_accumulating = False
        self._over = False
        self._closed = False

    # ---- Resuming

    def resume(self, loader: Any = None) -> Resumed:
        """Choose, load, restore and verify, unless that is done; return how much of the run is done.

        Every rank calls it; the first :meth:`epochs` or :meth:`batches` does. Call it yourself where something must
        follow it and come before them, such as the start of a tracker; or with the training loader, where the loop
        cannot be wrapped. The first pass over that loader then yields what is left of the epoch that is returned, and
        :meth:`step` saves at once.

        Args:
            loader: the training loader of a loop that iterates over it itself.

        Raises:
            ResumeError: as the documentation's tables of errors say.
        """
        done = self._resume()
        with self._closing():
            self._checkpointing.loaded.verify()
        self._checkpointing.loaded.hand_over()
        if loader is not None:
            self._passes.track_external(loader, self._begin_epoch)
        return done

    def _resume(self) -> Resumed:
        if self._resumed is None:
            with self._closing():
                self._framework.require_complete()
                self._resumed = self._checkpointing.restore()
            self.epoch, self.global_step = self._resumed.epoch, self._resumed.step
            self._session.begin_observing()
            self._guard.begin()
            self._passes.begin_loop()
        return self._resumed

    @contextlib.contextmanager
    def _closing(self) -> Iterator[None]:
        """Close the run if it cannot be resumed."""
        try:
            yield
        except BaseException as error:
            self._session.log_refusal(error)
            self._session.close()
            raise

    # ---- The loop

    def epochs(self, count: int | None = None, *, max_steps: int | None = None) -> Iterator[int]:
        """Yield the epochs that are left, counted from 0; the first may be one that is half done.

        When they are through, the last step is saved, and the run is marked as finished.

        Args:
            count: epochs of the whole run; without it, ``max_steps`` ends the run.
            max_steps: optimizer steps of the whole run. After them :meth:`batches` yields no more.

        Raises:
            UnsupportedSetting: neither is given; or it was called before; or this process has finished a training in
                the same run directory, and no more is asked for.
        """
        if count is None and max_steps is None:
            raise UnsupportedSetting("run.epochs() needs a number of epochs, max_steps=, or both, to know its end")
        is_again = self._extent != Extent(None, None)
        self._extent = Extent(count, max_steps)
        if max_steps is not None:
            self._session.rescale.forbid(GIVEN_IN_STEPS)
        try:
            self._session.require_continuation(self._extent)
            if is_again:
                raise UnsupportedSetting(
                    "run.epochs() is called again on the same run, as where the cell of a notebook is run again: run "
                    "what makes the model, the optimizer, the loader and the run "
                    f"({self._framework.about.registers}) again before it, and it resumes"
                )
        except BaseException:
            self._closed = True
            self._session.close()
            raise
        if self._resumed is not None:
            self._passes.begin_loop()  # the script may have made loaders since
        self._resume()
        self._over = self._was_finished()
        if self._over:
            with self._closing():
                self._checkpointing.loaded.verify()
            self._session.log_finished(self.global_step, str(self._extent))
        else:
            try:
                yield from self._epochs(count)
            except GeneratorExit:
                self._passes.reopen()
                raise
        self.finish()

    def _epochs(self, count: int | None) -> Iterator[int]:
        with self._closing():
            self._checkpointing.begin_epochs()
        while count is None or self.epoch < count:
            self._checkpointing.begin_epoch()
            yield self.epoch
            self._guard.require_counted()
            self._has_moved = True
            if self._is_through():
                break
            self._passes.end_epoch()
            self._begin_epoch()
            self._due = self._due or self._each_epoch
            self._end_of_body()

    def steps(self, count: int) -> Iterator[int]:
        """Yield the optimizer steps that are left, counted from 0, of a loop whose data come from no loader.

        The data must follow from the random state, which continues, or from the step. A checkpoint is taken between
        two steps, so no batch may be fetched ahead. When the steps are through, the run is marked as finished.

        Args:
            count: optimizer steps of the whole run.

        Raises:
            UnsupportedSetting: nothing says when to save; or as :meth:`epochs`.
        """
        if self._each_epoch:
            raise UnsupportedSetting(
                "run.steps() has no epochs at whose end a checkpoint could be saved: pass save_every= to the run, such "
                "as save_every=500"
            )
        for _ in self.epochs(max_steps=count):
            self._passes.is_in_steps = True
            try:
                while self.global_step < count:
                    self._begin_body()
                    step, steps = self.global_step, self._guard.steps
                    yield step
                    self._has_moved = True
                    self._guard.end_body(steps, is_counted=step < self.global_step)
                    self._end_of_body()
            finally:
                self._passes.is_in_steps = False

    def _begin_epoch(self) -> None:
        self.epoch += 1
        self._metrics.begin_epoch()
        self._windows.begin_epoch()

    def _is_through(self) -> bool:
        """Return whether ``max_steps`` ended the epoch before its batches did."""
        return self._extent.steps is not None and self.global_step >= self._extent.steps

    def _was_finished(self) -> bool:
        former = self._run.previous
        return (
            former is not None
            and former.state is RunState.FINISHED
            and (former.step, former.result) == (self.global_step, self._result())
        )

    def _result(self) -> dict[str, Any]:
        return {"epochs": self._extent.epochs, "max_steps": self._extent.steps}

    def batches(self, loader: Any, *, limit: int | None = None) -> Batches:
        """Return the batches of a loader that are left of its pass in the running epoch, and whole passes after that.

        A pass that a checkpoint was taken after yields nothing. Each launch must begin the passes of an epoch in the
        same order, one after the other or together with ``zip``. Loaders may be made in each epoch.

        What is returned may be iterated again once its pass is over, for the next one, as a loader may. Its ``len()``
        is that of the whole pass, also where only a part of it is left.

        Args:
            loader: the loader.
            limit: batches of the whole pass at most, over all launches.

        Raises:
            StateMismatch: the loader has a different dataset, batch size or number of workers than when it was saved.
            NotRestored: the data that come now are not those that would have come.
            UnsupportedSetting: a pass goes on in the next epoch, or beyond where every pass before was left.
        """
        return Batches(lambda: self._pass(loader, limit), loader, limit)

    def enumerate(self, loader: Any, start: int = 0, *, limit: int | None = None) -> Iterator[tuple[int, Any]]:
        """Return the batches of :meth:`batches`, each with its number in the pass, which continues after a resume.

        Args:
            loader: the loader.
            start: number of the first batch of a pass.
            limit: batches of the whole pass at most, over all launches.

        Raises:
            ResumeError: as :meth:`batches`.
        """
        return Batches(lambda: self._pass(loader, limit, start), loader, limit)

    def _pass(self, loader: Any, limit: int | None, start: int | None = None) -> Generator[Any, None, None]:
        """Yield the batches of a pass; with a start, each with its number, counted from there."""
        self.resume()
        if self._passes.next_goes_on:
            with self._closing():
                self._checkpointing.go_on()
        open_pass = None if self._over else self._passes.begin(loader, limit)
        if open_pass is None:
            return
        try:
            yield from self._batches(open_pass, start)
        except GeneratorExit:
            self._passes.leave(open_pass)
            raise
        finally:
            if not self._is_through():
                self._passes.end(open_pass)

    def _batches(self, open_pass: LoopLoader, start: int | None) -> Iterator[Any]:
        if open_pass.at_end:
            self._passes.skip(open_pass)
            return
        if self._is_through():
            return
        session, passes, guard = self._session, self._passes, self._guard
        for batch in open_pass:
            self._begin_body()
            if session.trace is not None:
                session.trace.add_batch(batch)
            passes.hand(open_pass)
            counted, steps = guard.counted, guard.steps
            yield batch if start is None else (start + open_pass.consumed - 1, batch)
            self._has_moved = True
            if passes.begins_round(open_pass):
                if not passes.is_in_steps:
                    guard.end_body(steps, is_counted=counted < guard.counted)
                self._end_of_body(open_pass)
            if self._is_through():
                return

    def _begin_body(self) -> None:
        self._asked.begun += 1
        if self._holds or not self._session.has_begun:
            self._session.begin_step()

    @property
    def _is_in_body(self) -> bool:
        return self._passes.is_in_steps or bool(self._passes.open)

    def step(self, loss: Any = None, metrics: Mapping[str, float] | None = None) -> None:
        """Count the batches that were taken since the last call; call it after each batch, or each optimizer step.

        Where an optimizer step has ended with them, the step is counted, and a save or a stop may be due: it follows
        when the body of the loop ends.

        Args:
            loss: the batch's loss, a tensor or a number, for :attr:`mean_loss` and the manifest. It is not waited for.
            metrics: the metrics of a checkpoint of this step in its manifest; retention can choose by them.
        """
        passes, trace = self._passes, self._session.trace
        self._guard.counted += 1
        if self._checkpointing.script is None:
            self._checkpointing.watch_script()
            passes.require_same_topology()
        batches = passes.take()
        self._metrics.add(loss, metrics)
        if trace is not None:
            trace.add_loss(loss)
        has_stepped = self._framework.has_stepped()
        self._is_accumulating = not has_stepped and (batches > 0 or self._is_accumulating)
        done, end = passes.reached()
        differs = self._windows.add(batches, has_stepped, is_last=end is None or done >= end)
        if differs and not self._session.loaders.topology_changes:  # which may change the accumulation, too
            raise other_window()
        if not has_stepped:
            return
        if trace is not None:
            trace.set_grad_norm(self._framework.grad_norm())
        self.global_step += 1
        decision = self._session.end_step(self.global_step, self._fraction(), self._extent.steps)
        self._due = self._due or decision.save or decision.stop or self._is_through()
        self._is_due_in_memory = self._is_due_in_memory or decision.save_to_memory
        if not self._is_in_body or passes.ahead.is_prefetching:  # then the next batch is asked for anywhere in the body
            self._end_of_body()

    @property
    def mean_loss(self) -> float:
        """The mean of the losses since the epoch began, across launches; 0.0 before the first."""
        return self._metrics.mean_loss

    @property
    def memory(self) -> dict[str, Any]:
        """A dict of the script that is saved with each checkpoint and restored, on each rank: numbers, text, tensors.

        A run that is not resumed yet resumes when it is asked for.
        """
        self._resume()
        self._checkpointing.loaded.hand_over()
        return self._checkpointing.memory

    # ---- Saving

    def save(self, reason: str = "requested") -> None:
        """Save a checkpoint when the body of the loop ends; outside of it, now; nothing before or after the loop.

        While gradients are accumulated it is saved after the step that uses them. Every rank calls it.

        Args:
            reason: the reason in the manifest and in ``resume-adapters ls``.

        Raises:
            UnsupportedSetting: another rank has gone on without, as where it is called below ``if rank == 0``.
        """
        if self._closed or self._resumed is None:
            return
        self._is_asked = True
        self._session.reason = reason
        if not self._is_in_body:
            self._end_of_body()

    def halt(self, reason: str) -> None:
        """Stop the run for a human to look at: it saves, leaves with exit code 3, and refuses to start again.

        ``resume-adapters stop --undo RUN_DIR`` lets it go on.

        Args:
            reason: what the human is to look at.
        """
        self._run.flag.halt(reason)

    def best(self, metric: float, *, mode: str = "min", name: str = "metric") -> bool:
        """Return whether a metric is the best so far; if so, save, and keep that checkpoint whatever the policy.

        Args:
            metric: the value, alike on every rank.
            mode: ``"min"`` or ``"max"``: whether smaller or greater is better.
            name: what the manifest calls it.
        """
        is_best = self._metrics.is_best(metric, mode, name)
        if is_best:
            self.save("best")
        return is_best

    def _end_of_body(self, asked: LoopLoader | None = None) -> None:
        """Save if that is due and no gradients are held, and leave if that was agreed on.

        Args:
            asked: the loader that is asked for its next batch now; ``None`` where none is.
        """
        is_due = self._due or self._is_asked or self._is_due_in_memory
        if not (is_due or self._holds) or self._is_accumulating:
            return
        if self._passes.is_ahead or self._framework.is_accumulating():
            return
        self._checkpointing.keep(self.epoch, self.global_step)
        if is_due:
            if asked is not None and not self._is_through():
                asked.fetch_ahead()
            # Where steps or the clock say it, all ranks know; and a restartable block notices a hang by itself.
            is_agreed = self._due or (self._is_asked and (self._holds or self._run.ranks.world_size == 1))
            if not is_agreed and self._is_due_in_memory:
                self._save(to_memory=True)
            if not is_agreed and self._is_asked:
                self._asked.meet(self.global_step)
            if self._due or self._is_asked:
                self._save()
            if self._session.stopping:
                self._run.leave(self.global_step, self._fraction())

    def _save(self, *, to_memory: bool = False) -> None:
        self._is_due_in_memory = False
        if not to_memory:
            self._due = self._is_asked = self._has_moved = False
        self._checkpointing.save(self.epoch, self.global_step, to_memory=to_memory)

    def _fraction(self) -> float:
        return self.epoch + self._passes.fraction

    # ---- Ending

    def finish(self) -> None:
        """Save what is not saved, and mark the run as finished: a relaunch does nothing.

        The end of :meth:`epochs` and of ``with run:`` call it.
        """
        if self._closed or self._resumed is None:
            return
        self._guard.require_counted()
        self._closed = True
        self._session.begin_ending()
        if self._has_moved or self._run.last_commit != self.global_step:
            # What the script did since the last save (an evaluation, a log) is not to be lost to a relaunch.
            self._save()
        self._run.saver.flush()
        self._session.finish(self._extent, step=self.global_step, epoch=self._fraction(), result=self._result())
        self._session.close()

    def __enter__(self) -> ResumableLoop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.finish()
            elif isinstance(error, Exception) and not self._closed:
                self._session.fail(error, self.global_step)
        finally:
            self._closed = True
            self._session.close()

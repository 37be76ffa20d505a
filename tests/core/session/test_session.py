"""What an adapter asks of a session between its steps."""

from __future__ import annotations

import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from resume_adapters.core.checkpoint.resolve import open_checkpoint
from resume_adapters.core.checkpoint.retention import KeepBest, KeepLast
from resume_adapters.core.checkpoint.validity import NoForeign
from resume_adapters.core.loop.checkpointing import LoopRankState
from resume_adapters.core.ranks import SingleProcess
from resume_adapters.core.recovery.plan import Moment
from resume_adapters.core.run.run import ResumableRun
from resume_adapters.core.run.step_control import Decision
from resume_adapters.core.session.held import SaveForm
from resume_adapters.core.session.options import OptionsCallback, ResumeOptions
from resume_adapters.core.session.rescale import Rescale
from resume_adapters.core.session.session import Session
from resume_adapters.core.state.stateful import StatefulGroup
from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.errors import SaveFailed, StateMismatch, UnsupportedSetting
from resume_adapters.recovery import Attempt, restartable

from miniature import new_run
from plain_torch import PlainTorch, Still, StillState


def begun(directory: Path, parts: dict[str, Any] | None = None, accumulation: int = 1, **options: Any) -> Session:
    """Return a session that has chosen what it resumes from."""
    run = new_run(directory, **options)
    framework = PlainTorch(accumulation, ranks=1)
    session = Session(
        run, framework, ResumeOptions(parts=parts or {}), LoopRankState, Rescale("refuse", framework.about.accumulation)
    )
    session.open()
    return session


def test_an_evaluation_without_the_metric_of_the_policy_is_an_error(tmp_path: Path) -> None:
    session = begun(tmp_path, keep=KeepLast(1) | KeepBest(1, "eval_los"))
    session.require_metrics({"eval_los": 1.0})
    with pytest.raises(UnsupportedSetting, match=r"the best by 'eval_los', .* did you mean `eval_loss`"):
        session.require_metrics({"eval_loss": 1.0, "epoch": 2})
    with pytest.raises(UnsupportedSetting, match=r"expected one of its metrics\. It has epoch"):
        session.require_metrics({"epoch": 2})
    session.run.close()
    without = begun(tmp_path / "without", keep=KeepLast(1))
    without.require_metrics(())
    without.run.close()


def test_a_callback_halts_the_run_of_the_call_that_is_under_way(tmp_path: Path) -> None:
    class Callback(OptionsCallback):
        session: Session | None = None

        @property
        def active_run(self) -> ResumableRun | None:
            return self.session.run if self.session else None

    OptionsCallback().halt("nothing is ever under way")
    callback = Callback(ema=torch.nn.Linear(1, 1))
    callback.halt("nothing is under way")
    session = callback.session = begun(tmp_path, dict(callback.options.parts))
    assert set(session.options.parts) == {"ema"} and not session.ask_to_stop()
    callback.halt("the loss is not a number")
    assert session.ask_to_stop() and session.run.flag.halted
    session.run.close()


def test_a_callback_has_warnings_ignored_that_come_before_any_hook() -> None:
    class Callback(OptionsCallback):
        needless_warnings = ("no checkpoint is there",)

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        Callback()
        warnings.warn("no checkpoint is there: HINT", stacklevel=1)
        warnings.warn("the disk is full", stacklevel=1)
    assert [str(each.message) for each in found] == ["the disk is full"]


def test_what_an_adapter_undoes_comes_before_the_run_is_closed(tmp_path: Path) -> None:
    """The handlers of signals are the run's; they go even where an adapter fails to undo something."""
    before = signal.getsignal(signal.SIGTERM)
    found: list[bool] = []

    def undo() -> None:
        found.append(signal.getsignal(signal.SIGTERM) == before)

    def fail() -> None:
        raise ZeroDivisionError

    session = begun(tmp_path)
    session.close(undo)
    undo()
    assert found == [False, True]
    session = begun(tmp_path)
    with pytest.raises(ZeroDivisionError):
        session.close(undo, fail)
    undo()
    assert found == [False, True, False, True]


def test_a_newer_checkpoint_outside_the_run_directory_is_resumed_from_instead(tmp_path: Path) -> None:
    """As Lightning's adapter does with what Slurm's handler saved."""

    def run(name: str) -> ResumableRun:
        return ResumableRun(tmp_path / name, ranks=SingleProcess())

    for name, step in (("run", 4), ("elsewhere", 8)):
        still = Still(rank=step)
        saving = still.session(run(name))
        saving.save(f"checkpoint-{step}", step, still)
        saving.close()
    session = Still().session(run("run"))
    assert session.context is not None and (session.context.step, session.context.rank_state.rank) == (4, 4)
    newer = open_checkpoint(LocalStorage(), tmp_path / "elsewhere" / "checkpoint-8", NoForeign())
    session.restorer.replace_context(session.restorer.read(newer))
    assert (session.context.step, session.context.rank_state.rank) == (8, 8)
    session.close()


def test_a_model_that_has_got_another_tensor_is_not_saved(tmp_path: Path) -> None:
    """Each resume from it would be refused, since the script builds the model as it was at first."""
    still = Still()
    session = still.session(ResumableRun(tmp_path, ranks=SingleProcess()))
    session.begin_observing()
    session.save("checkpoint-1", 1, still)
    still.model.register_buffer("bank", torch.zeros(3))
    with pytest.raises(UnsupportedSetting, match=r"bank: nothing before the first step, float32\[3\] now"):
        session.save("checkpoint-2", 2, still)
    session.close()
    assert (tmp_path / "checkpoint-1").exists() and not (tmp_path / "checkpoint-2").exists()


def test_within_a_block_an_attempt_that_is_left_neither_saves_nor_stops(tmp_path: Path) -> None:
    found: list[Any] = []

    @restartable(max_restarts=0)
    def main(attempt: Attempt) -> None:
        session = Still().session(ResumableRun(tmp_path))
        assert session.held is not None
        found.append(session.ask_to_stop())
        session.run.flag.request("SIGTERM")
        session.held.attempt.fail(ZeroDivisionError("of this rank"))
        found.extend([session.end_step(1, 0.1), session.stopping])
        raise ZeroDivisionError("of this rank")

    with pytest.raises(ZeroDivisionError):
        main()
    assert found == [False, Decision(save=False, stop=False), False]


def test_within_a_block_a_state_that_no_save_could_write_exactly_is_not_used(tmp_path: Path) -> None:
    found: list[tuple[Moment | None, str]] = []

    @restartable(max_restarts=0)
    def main(attempt: Attempt) -> None:
        still, own = Still(), {"callbacks": [{"count": 1}]}
        session = still.session(ResumableRun(tmp_path))
        session.begin_observing()
        for step, objection in ((1, ""), (2, "a callback adds what it holds")):
            session.keep(step, still, SaveForm(f"checkpoint-{step}", own=own, objection=objection))
            assert session.held is not None
            report = session.held.report(is_updating=False)
            found.append((report.moment, report.objection))
        session.close()

    main()
    assert found == [(Moment(1), ""), (Moment(2), "a callback adds what it holds")]


class Unwritable(Still):
    """Its framework refuses to save, for a reason that is not the disk's."""

    def save(self, directory: Path) -> None:
        raise ValueError("this model cannot be saved")


def test_what_a_framework_raises_in_a_save_is_named(tmp_path: Path) -> None:
    still = Unwritable()
    session = still.session(ResumableRun(tmp_path))
    with pytest.raises(SaveFailed, match="could not write checkpoint-1: this model cannot be saved"):
        session.save("checkpoint-1", 1, still)
    session.close()


def test_within_a_block_all_ranks_leave_where_a_framework_cannot_save(tmp_path: Path) -> None:
    """The others may wait for this rank within the framework's save."""
    left: list[bool] = []

    @restartable(max_restarts=0)
    def main(attempt: Attempt) -> None:
        still = Unwritable()
        session = still.session(ResumableRun(tmp_path))
        assert session.held is not None
        try:
            session.save("checkpoint-1", 1, still)
        finally:
            left.append(session.held.attempt.is_left)

    with pytest.raises(ValueError, match="cannot be saved"):
        main()
    assert left == [True]


def test_of_a_group_of_statefuls_one_may_go_and_none_may_come(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def meters(*names: str) -> StatefulGroup:
        return StatefulGroup({name: torch.nn.Linear(1, 1) for name in names})

    still = Still()
    options = ResumeOptions(parts={"meters": meters("loss", "speed")})
    session = Session(ResumableRun(tmp_path), still, options, StillState, Rescale("refuse", 1))
    session.open()
    session.save("checkpoint-1", 1, still)
    session.close()
    again = still.session(ResumableRun(tmp_path))
    assert again.context is not None
    left, more = meters("loss"), meters("loss", "rate")
    again.context.reader.restore({"meters": left})
    assert "checkpoint-1 has meters: speed, which is not given in this launch" in caplog.text
    assert left.state_dict()["loss"] == options.parts["meters"].state_dict()["loss"]
    with pytest.raises(StateMismatch, match="meters: rate"):
        again.context.reader.restore({"meters": more})
    again.close()

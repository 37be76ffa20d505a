"""The losses and metrics of a script, in the manifests and in the choice of the best checkpoint."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from resume_adapters import KeepAll, KeepBest
from resume_adapters.errors import UnsupportedSetting

from faults import Disturbed, refuse
from plain_torch import Killed, Launch, killed_after, manifest, reasons


def test_the_best_is_saved_and_remembered(tmp_path: Path) -> None:
    found = []

    def evaluate(launch: Launch) -> None:
        values = {3: 2.0, 5: 1.0, 7: float("nan"), 9: 1.5, 11: 0.5}
        if launch.loop.global_step in values:
            found.append(launch.loop.best(values[launch.loop.global_step], name="eval_loss"))
        killed_after(8)(launch)

    with pytest.raises(Killed):
        Launch(tmp_path, evaluate, save_every=100)()
    assert found == [True, True, False]
    found.clear()
    Launch(tmp_path, evaluate, save_every=100, epochs=2)()
    assert found == [False, False, True], "step 7 comes again"
    assert reasons(tmp_path) == {3: "best", 5: "best", 11: "best", 12: "finished"}
    saved = manifest(tmp_path / "checkpoint-11")
    assert (saved["metrics"]["eval_loss"], saved["best"]) == (0.5, "checkpoint-11")
    following = manifest(tmp_path / "checkpoint-12")
    assert (set(following["metrics"]), following["best"]) == ({"loss"}, "checkpoint-11"), "said of one step only"


def test_the_best_may_be_the_greatest_and_nothing_else(tmp_path: Path) -> None:
    found = []
    Launch(tmp_path, lambda launch: found.append(launch.loop.best(-abs(4 - len(launch.trace)), mode="max")))()
    assert found == [True] * 4 + [False] * 14
    with pytest.raises(UnsupportedSetting, match='mode must be "min" or "max", got \'least\''):
        Launch(tmp_path).loop.best(1.0, mode="least")


def test_a_step_may_tell_no_loss_and_other_metrics(tmp_path: Path) -> None:
    launch = Launch(tmp_path)
    assert launch.loop.mean_loss == 0.0
    with launch.loop:
        for _ in launch.loop.epochs(1):
            for batch in launch.loop.batches(launch.loader()):
                launch.framework.train(batch)
                launch.loop.step(metrics={"norm": 0.25})
    assert manifest(tmp_path / "checkpoint-4")["metrics"] == {"norm": 0.25}
    assert launch.loop.mean_loss == 0.0


@pytest.mark.parametrize("stuck", ["weights.pt", "rank-00000.json"], ids=["in the commit", "in the write"])
def test_a_save_that_fails_leaves_its_metrics_and_the_best_to_the_next_one(tmp_path: Path, stuck: str) -> None:
    storage = Disturbed()

    def fail(operation: str, path: Path) -> None:
        if operation in ("write", "sync") and path.name == stuck:
            refuse(errno.EIO)

    def evaluate(launch: Launch) -> None:
        if launch.loop.global_step == 3:
            storage.before = fail
            assert launch.loop.best(1.0, name="eval_loss")
        if launch.loop.global_step == 4:
            [each.wait() for each in launch.run.saver.engine.in_flight]
            storage.before = lambda operation, path: None

    Launch(tmp_path, evaluate, storage=storage, on_save_error="continue", keep=KeepAll(), epochs=2)()
    assert not (tmp_path / "checkpoint-3").exists()
    repeated, following = (manifest(tmp_path / f"checkpoint-{step}") for step in (4, 8))
    assert (repeated["metrics"]["eval_loss"], repeated["best"]) == (1.0, "checkpoint-4")
    assert (set(following["metrics"]), following["best"]) == ({"loss"}, "checkpoint-4")


@pytest.mark.parametrize("metric", ["eval_loss", "loss", "eval_los"])
def test_a_metric_of_the_policy_that_no_evaluation_has_is_an_error_at_the_next_save(
    metric: str, tmp_path: Path
) -> None:
    def evaluate(launch: Launch) -> None:
        if launch.loop.global_step == 5:
            launch.loop.best(1.0, name="eval_loss")

    launch = Launch(tmp_path, evaluate, save_every=4, keep=KeepBest(1, metric))
    if metric != "eval_los":
        launch()
        return
    with pytest.raises(UnsupportedSetting, match=r"the best by 'eval_los', .* did you mean `eval_loss`"):
        launch()
    assert launch.loop.global_step == 5 and (tmp_path / "checkpoint-4").is_dir()

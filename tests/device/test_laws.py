"""Law 15 for a hand-written loop: all its random numbers come from the device. The adapters' own tests have theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from device.compiled import DEVICE, require_test_device

import contract
from launch import is_installed

pytestmark = pytest.mark.skipif(not is_installed("accelerate"), reason="the job trains with Accelerate")

CONFIG: dict[str, Any] = {"device": DEVICE}
KILLS = [{"event": "batch_end", "step": 8}, {"event": "step_end", "step": 13}]


@pytest.mark.parametrize("stage", ["off", "memory"])
def test_killed_twice_equals_never(stage: str, bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """Laws 1 and 2: dropout, noise of a registered generator, and a scaler whose steps overflow, on the device."""
    expected = reference(CONFIG)
    assert len({line["scale"] for line in expected.steps[0]}) > 3, "the scale moves"
    config = {**CONFIG, "options": {"stage": stage}}
    contract.interrupted_equals_uninterrupted(bench, tmp_path, config, expected, KILLS)


def test_killed_on_a_side_stream(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """What a save copies on the stream that trains is what was there, though the device has not read it yet."""
    config = {**CONFIG, "side_stream": True, "options": {"stage": "memory"}}
    contract.interrupted_equals_uninterrupted(bench, tmp_path, config, reference(CONFIG), KILLS)


def test_a_save_takes_no_memory_of_the_device(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """A run that has room for its training has room for its saves; one that runs out of memory resumes exactly."""
    require_test_device()
    bench.run(tmp_path / "unsaved", {**CONFIG, "options": {"save_every": 1000}}).require_success()
    peak = str(int((tmp_path / "unsaved" / "peak").read_text()) + 64)  # a few numbers
    config = {**CONFIG, "options": {"stage": "memory"}}
    outcome = bench.run(tmp_path, {**config, "leaks_at": 8}, env={"WALLED_MEMORY": peak})
    assert outcome.statuses == (1,) and "OutOfMemoryError: the test device is out of memory" in outcome.output
    outcome = bench.run(tmp_path, {**config, "repeats": False}, env={"WALLED_MEMORY": peak}).require_success()
    assert "what follows is the same up to the last digits, as kernels need not repeat" in outcome.output
    trace, expected = contract.read_trace(tmp_path), reference(CONFIG)
    contract.require_same_steps(trace, expected, start=6)
    contract.require_same_end(trace, expected)


def test_a_launch_that_sees_fewer_devices_goes_on(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """The run has trained on one of two, and the next launch sees that one."""
    assert bench.run(tmp_path, {**CONFIG, "kill": KILLS[0]}).killed
    outcome = bench.run(tmp_path, CONFIG, env={"WALLED_VISIBLE_DEVICES": "1"}).require_success()
    assert f"On {DEVICE} the state is restored bit for bit, and what follows is the same bit for bit." in outcome.output
    trace, expected = contract.read_trace(tmp_path), reference(CONFIG)
    contract.require_same_steps(trace, expected, start=6)
    contract.require_same_end(trace, expected)


@pytest.mark.parametrize(("saved", "here"), [(DEVICE, "cpu"), ("cpu", DEVICE)])
def test_on_another_kind_of_device_the_weights_are_loaded(
    saved: str, here: str, bench: contract.Bench, tmp_path: Path
) -> None:
    """One line says that the run is no longer exact, and which random state is lost."""
    assert bench.run(tmp_path, {"device": saved, "kill": KILLS[0]}).killed
    outcome = bench.run(tmp_path, {"device": here}).require_success()
    assert contract.read_trace(tmp_path).first_step == 6
    (said,) = [line for line in outcome.output.splitlines() if "no longer exact" in line]
    assert f"saved on {saved} and is resumed on {here}, where the random state of {saved} does not serve" in said


def test_random_state_that_the_device_does_not_give_is_missing(bench: contract.Bench, tmp_path: Path) -> None:
    """Law 9."""
    outcome = bench.run(tmp_path, {**CONFIG, "without_random_state": True}).require_success()
    said = [line for line in outcome.output.splitlines() if "rng MISSING" in line]
    assert len(said) == 1 and f"MISSING: torch.{DEVICE} has no get_rng_state: after a resume" in said[0]

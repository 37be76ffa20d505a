"""Variables that a script carries from step to step are found in its source, and what it keeps in ``run.memory``."""

from __future__ import annotations

import collections
import runpy
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from resume_adapters.core.observed.script import PACKAGE, Place, calling_script, carried, is_of_script, of_the_run
from resume_adapters.errors import NotSerialisable

from plain_torch import Killed, Launch, killed_after, manifest

FOUND: dict[str, tuple[str, list[str]]] = {
    "a patience": (
        """
best, patience = float("inf"), 0
for epoch in range(2):
    loss = 1.0
    step()
    if loss < best:
        best = loss
        patience = 0
    else:
        patience += 1
    if patience > 3:
        break
""",
        ["best", "patience"],
    ),
    "what a later epoch sets for those that follow": (
        """
reference = None
for epoch in range(2):
    if epoch == 1:
        reference = 1.0
    for batch in range(2):
        print(reference)
        step()
""",
        ["reference"],
    ),
    "code that is chosen, and a phase": (
        """
import enum, functools
import torch
phase = enum.Enum("Phase", "FIRST LATER")
now, criterion, reduced, module = phase.FIRST, functools.partial(torch.sum, dim=0), max, torch.nn.Linear(1, 1)
for epoch in range(2):
    step()
    print(now, criterion, module)
    loss = torch.nn.MSELoss() if reduced is max else torch.nn.L1Loss()
    if epoch == 0:
        now, criterion, reduced, module = phase.LATER, torch.nn.L1Loss(), min, torch.nn.Linear(1, 1)
""",
        ["now", "criterion", "reduced"],
    ),
    "a sum that is reset in each epoch": (
        """
for epoch in range(2):
    running = 0.0
    for batch in range(2):
        running += batch
        step()
    print(running)
""",
        ["running"],
    ),
    "nothing that is filled: what it holds is compared": (
        "losses = []\nwhile True:\n    losses.append(1.0)\n    step()\n    break\n",
        [],
    ),
    "in a function, and in the one that calls it": (
        """
def train(loader):
    seen: int = 0
    for batch in loader:
        seen += 1
        step()

def main():
    epochs = -1
    for epoch in range(2):
        epochs += 1
        train(range(3))

main()
""",
        ["seen", "epochs"],
    ),
    "a loss that each step computes, after a first value": (
        """
loss = 0.0
for epoch in range(2):
    for batch in range(2):
        loss = batch + 1
        print(loss)
        step()
""",
        [],
    ),
    "a value of the branch that was not taken": (
        """
if not step:
    loss = 1.0
elif step is None:
    loss = 2.0
else:
    loss = [3.0]
    seen = 0
    for epoch in range(2):
        seen += 1
        print(loss)
        loss = epoch
        step()
""",
        ["loss", "seen"],
    ),
    "the same name in another branch": (
        """
if not step:
    loss = 1.0
else:
    for epoch in range(2):
        for batch in range(2):
            if epoch:
                print(loss)
            loss = batch + 1
            step()
""",
        [],
    ),
    "a batch fetched ahead": (
        """
batch = None
for _ in range(2):
    loss = batch
    batch = [1]
    step()
""",
        ["batch"],
    ),
    "in what it is computed from": ("x = math.inf\nfor _ in range(2):\n    x = min(x, 1)\n    step()\n", ["x"]),
    "nothing that each step begins with": (
        """
loss, batch, rate = None, None, 0.0
total = 0
for batch in range(2):
    with open("/dev/null"):
        loss: float = 2.0 * batch
    rate = loss
    print(rate, loss, total)
    step()
""",
        [],
    ),
    "a hidden state, and a rate that is divided": (
        """
def initial():
    return [0.0], 1
hidden, count = initial()
rate = len(hidden) * 2.0
batches = iter([1, 2])
for _ in range(2):
    hidden = [each + 1 for each in hidden]
    count = count + 1
    rate /= 4
    batches = iter([next(batches)])
    step()
""",
        ["hidden", "count", "rate", "batches"],
    ),
    "iterators that it advances, of the run's none": (
        """
import itertools
class Run:
    def step(self):
        step()
run, scales, rates, rows = Run(), itertools.cycle([1, 2]), (1 / n for n in range(1, 9)), [1]
given = iter(run.__dict__)
for _ in range(2):
    next(scales), next(rates, None), next(iter(rows)), next(given, None)
    run.step()
""",
        ["scales", "rates"],
    ),
    "what generators over a run's batches carry, not themselves": (
        """
class Again:
    def __init__(self, loader):
        self.loader, self.inner = loader, iter(loader)
    def __iter__(self):
        return self
    def __next__(self):
        return next(self.inner)
def cycle(loader):
    while True:
        for each in loader:
            yield each
def again(loader):
    inner = iter(loader)
    while True:
        yield next(inner)
def counted(loader):
    index = 0
    for each in cycle(loader):
        index += 1
        yield index
def in_turn(loader, words):
    for each in zip(loader, words):
        yield each
batches, drawn, own, steps = iter(given()), cycle(given()), again(given()), counted(given())
scaled, kept = map(str, (each for each in cycle(given()))), Again(given())
pairs, places, part = in_turn(given(), [1, 2]), enumerate(given()), iter([1, 2])
for _ in range(2):
    next(batches), next(drawn), next(own), next(steps), next(scaled), next(kept), next(pairs), next(places), next(part)
    step()
""",
        ["index", "pairs", "places", "part"],
    ),
    "nothing that comes of the run, of a clock or of a model": (
        """
import time
class Run:
    start = 3
    def step(self):
        step()
run, meter, began = Run(), set(), time.time()
steps, model = run.start, Run()
for _ in range(2):
    steps += 1
    meter.update([1])
    model = model or Run()
    began = began + 1
    run.step()
    meter = {steps, *meter}
""",
        ["meter"],
    ),
    "nothing that follows from the run": (
        """
class Run:
    global_step = 3
    def resume(self):
        return self
    def step(self):
        step()
run = Run()
start = run.resume()
steps, count = run.global_step, 0
first = start.global_step
batches = start
def train():
    global count
    run.step()
for _ in range(2):
    steps += 1; count += 1; first += 1; train()
""",
        ["count"],
    ),
    "nothing that the script takes from the memory of its run, but for what an epoch begins again": (
        """
class Run:
    global_step, memory = 3, {}
    def step(self):
        step()
run = Run()
kept = run.memory
seen, best, other, total = 0, 1.0, 0, kept.get("total", 0)
if kept:
    seen, best = kept["seen"], kept.get("best")
if kept:
    rate = kept["rate"]
else:
    rate = 0.1
for epoch in range(2):
    total = 0
    for batch in range(2):
        seen, best, other, rate, total = seen + 1, best + 1, other + 1, rate / 2, total + 1
        run.step()
""",
        ["other", "total"],
    ),
    "a text, and values from a tuple of another length": (
        """
text = ""
a, (b, c) = 1, (2, 3)
rows = [0]
rows[0] = 1
for _ in range(2):
    text += "x"
    a, b = a + 1, b + 1
    print(text)
    step()
""",
        ["text", "a"],
    ),
    "nothing of a function that is defined there": (
        """
total = 0
for _ in range(2):
    def add():
        total = 1
        return total
    class Kept:
        total += 1 if False else 0
    step()
""",
        [],
    ),
    "nothing without a loop": ("total = 0\ntotal += 1\nstep()\n", []),
    "nothing of another loop": ("total = {}\nfor _ in range(2):\n    step()\nfor _ in range(2):\n    total = {}\n", []),
}


@pytest.mark.parametrize("what", FOUND)
def test_what_a_loop_carries(what: str, tmp_path: Path) -> None:
    source, names = FOUND[what]
    script = tmp_path / "train.py"
    script.write_text("import math\n" + source)
    places: list[list[Place]] = []
    given = compile("def given():\n    yield from [1, 2, 3, 4]", f"{PACKAGE}/given.py", "exec")
    given_names: dict[str, Any] = {"step": lambda: places.append(calling_script())}
    exec(given, given_names)
    runpy.run_path(str(script), given_names)
    here = [each for each in places[0] if each.code.co_filename == str(script)]
    found = carried(here)
    assert sorted(each.split("`")[1] for each in found) == sorted(names)
    assert all("(train.py:" in each for each in found)
    assert carried([]) == []


class Batch:
    """What a step holds, and may be large."""


def test_what_a_step_holds_is_let_go_of() -> None:
    def train(held: list[Any]) -> None:
        batch = Batch()
        held.append(weakref.ref(batch))
        calling_script()
        del batch
        assert held[0]() is None

    def train_with_its_variables() -> None:
        rate, kept = 0.5, {}
        kept = locals()
        calling_script()
        assert kept["rate"] == rate

    train([])
    train_with_its_variables()


def test_a_script_without_a_source_carries_nothing_that_is_known(tmp_path: Path) -> None:
    places: list[list[Place]] = []
    source = "total = 0\nfor _ in range(2):\n    total += 1\n    print(total)\n    step()\n"
    for file in (tmp_path / "gone.py", tmp_path / "changed.py"):
        exec(compile(source, str(file), "exec"), {"step": lambda: places.append(calling_script())})
    (tmp_path / "changed.py").write_text("for")
    here = [[each for each in found if each.code.co_filename.startswith(str(tmp_path))] for found in places]
    assert [(len(each), carried(each)) for each in here] == [(1, [])] * 4


def test_what_the_loop_of_a_run_carries_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    launch = Launch(tmp_path, epochs=1)
    data, steps = launch.loader(), 0
    with caplog.at_level("INFO", "resume_adapters"), launch.loop:
        for _ in launch.loop.epochs(1):
            for batch in launch.loop.batches(data):
                launch._step(batch)
                steps += 1
                assert steps
    assert caplog.text.count("`steps` (test_script.py:") == 1
    assert "keep them in run.memory" in caplog.text


def test_names_that_follow_from_the_run_are_those_that_it_gives_values(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(
        "trainer.steps = run.global_step\nstart = run.resume()\n"
        "for trainer.epoch in run.epochs(3):\n    for batch in run.batches(loader):\n        trainer.batches += 1\n"
        "for trainer.step in run.steps(9):\n    pass\n"
    )
    place = Place(compile(file.read_text(), file, "exec"), 1, frozenset())
    assert of_the_run([place]) == {"steps", "start", "epoch", "batch", "step"}


@pytest.mark.parametrize("directory", ["site-packages", "dist-packages", "src"])
def test_what_is_installed_is_not_of_the_script(directory: str, tmp_path: Path) -> None:
    file = tmp_path / directory / "library" / "layers.py"
    assert is_of_script(str(file)) is (directory == "src")


def test_the_memory_of_a_run_goes_on(tmp_path: Path) -> None:
    def train(launch: Launch) -> dict[str, Any]:
        launch.loop.memory.setdefault("seen", 0)
        launch.loop.memory.setdefault("rows", [])
        if "last" not in launch.loop.memory:
            launch.loop.memory.update(last=collections.deque(maxlen=2), counts=collections.Counter())
        data = launch.loader()
        with launch.loop:
            for _ in launch.loop.epochs(3):
                for batch in launch.loop.batches(data):
                    launch.loop.memory["seen"] += 1
                    launch.loop.memory["last"].append(batch.sum())
                    launch.loop.memory["counts"].update([launch.loop.memory["seen"] % 4])
                    launch.loop.memory["rows"] = [*launch.loop.memory["rows"][-1:], batch.sum()]
                    launch._step(batch)
        return launch.loop.memory

    expected = train(Launch(tmp_path / "never"))
    with pytest.raises(Killed):
        train(Launch(tmp_path / "run", killed_after(7)))
    found = train(Launch(tmp_path / "run"))
    assert found == expected and found["seen"] == 18
    assert manifest(tmp_path / "run" / "latest")["step"] == 18


def test_what_is_no_data_is_not_kept(tmp_path: Path) -> None:
    launch = Launch(tmp_path)
    launch.loop.memory["model"] = torch.nn.Linear(1, 1)
    with pytest.raises(NotSerialisable, match="memory"):
        launch()

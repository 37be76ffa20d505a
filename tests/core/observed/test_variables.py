"""What the variables of a script hold and a loop changes is named, unless somebody saves it."""

from __future__ import annotations

import functools
import itertools
import random
import runpy
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import resume_adapters
from resume_adapters.core.dataloader.tracked import track
from resume_adapters.core.observed import code
from resume_adapters.core.observed.variables import ScriptVariables

from plain_torch import Launch

NAMED: dict[str, tuple[str, str, list[str]]] = {
    "generators": (
        "a, b, c = torch.Generator(), np.random.default_rng(0), random.Random(0)",
        "torch.rand(1, generator=a), b.random(), c.random()",
        ["`a` (a Generator)", "`b` (a Generator)", "`c` (a Random)"],
    ),
    "an average of the weights": (
        "teacher = torch.nn.Linear(2, 2)",
        "teacher.weight.data.mul_(0.5)",
        ["`teacher` (a Linear)"],
    ),
    "a queue of keys": (
        "queue, counts = torch.zeros(8), np.ones(2)",
        "queue[1:3] += 1.0; counts[0] *= 0.9",
        ["`queue` (a Tensor)", "`counts` (a ndarray)"],
    ),
    "containers": (
        "replay, table, seen, rows = deque(maxlen=2), {}, set(), [[0]]",
        "replay.append(object()); table[index] = 2; seen.add(index); rows[0][0] += 1",
        ["`replay` (a deque)", "`table` (a dict)", "`seen` (a set)", "`rows` (a list)"],
    ),
    "an object of the script": (
        "class Norm:\n    def __init__(self):\n        self.mean, self.fixed = torch.zeros(1), [1]\nnorm = Norm()",
        "norm.mean = norm.mean + 1",
        ["`norm.mean` (of a Norm)"],
    ),
    "settings": (
        "from argparse import Namespace\nfrom collections import UserDict\nfrom types import SimpleNamespace\n"
        "class Settings(dict):\n    pass\nargs, own = Namespace(rate=1.0, fixed=1), SimpleNamespace(rate=1.0)\n"
        "words, deep, read = Settings(rate=1.0), UserDict(low=UserDict(rate=1.0)), UserDict(rate=1.0)",
        "args.rate *= 0.9 * read['rate']; own.rate *= 0.9; words['rate'] *= 0.9; deep['low']['rate'] *= 0.9",
        [
            *("`args.rate` (of a Namespace)", "`deep.data` (of a UserDict)", "`own.rate` (of a SimpleNamespace)"),
            "`words` (a Settings)",
        ],
    ),
    "an object that has a state": (
        "scaler = torch.amp.GradScaler('cpu')",
        "scaler.scale(torch.ones(1)); scaler.update(2.0 + index)",
        ["`scaler` (a GradScaler)"],
    ),
    "what its functions and classes keep": (
        "best = 0\ndef weigh():\n    global best\n    best = best + 1\n    weigh.calls += 1\nweigh.calls = 0\n"
        "def counter():\n    count = 0\n    def add():\n        nonlocal count\n        count += 1\n    return add\n"
        "add = counter()\nclass Meter:\n    total, fixed = 0, 1\n    def update(self):\n        Meter.total += 1",
        "weigh(); add(); Meter().update()",
        ["`best` (a int)", "`weigh.calls` (a int)", "`count` (a int)", "`Meter.total` (a int)"],
    ),
    "code that is chosen": (
        "rate = abs\ndef loss(index):\n    global rate\n    if rate(index) == 1:\n        rate = float\n"
        "class Settings:\n    pass\nit = Settings()\nit.call, it.more, it.same = max, torch.nn.ReLU(), [torch.relu]",
        "loss(index); it.call = (max, min)[index > 0]; it.more = (it.more, torch.nn.GELU())[index > 0]",
        ["`it.call` (of a Settings)", "`it.more` (of a Settings)", "`rate` (a type)"],
    ),
    "iterators, and what holds one": (
        "def stream():\n    for each in DataLoader([1, 2, 3, 4]):\n        yield each\n"
        "class Trainer:\n    pass\nit = Trainer()\nit.batches, it.own = iter(DataLoader([1, 2, 3, 4])), stream()\n"
        "order, words, rest = itertools.count(), enumerate(['a', 'b', 'c', 'd']), iter([1, 2])",
        "next(it.batches), next(it.own), next(order), next(words)",
        [
            *("`it.batches` (of a Trainer)", "`it.own` (of a Trainer)", "`order` (a count)"),
            "`words` (a enumerate)",
        ],
    ),
    "nothing of an iterator over the batches of a run": (
        "batches = enumerate(given())",
        "next(batches)",
        [],
    ),
    "what a generator over the batches of a run keeps between two of them": (
        "def mixed(batches):\n    kept, order, number = [], random.Random(0), 0\n    for each in batches:\n"
        "        kept.append(each)\n        number = order.random()\n        yield each\n"
        "rows = mixed(given())",
        "next(rows)",
        ["`kept` (a list)", "`order` (a Random)"],
    ),
    "what one keeps that an object of the script holds": (
        "def mixed(batches):\n    kept = []\n    for each in batches:\n        kept.append(each)\n        yield each\n"
        "class Trainer:\n    pass\nit = Trainer()\nit.rows = mixed(given())",
        "next(it.rows)",
        ["`kept` (a list)"],
    ),
    "an iterator of the script over the batches of a run": (
        "class Counted:\n    def __init__(self, batches):\n        self.batches, self.count = batches, 0\n"
        "    def __iter__(self):\n        return self\n"
        "    def __next__(self):\n        self.count += 1\n        return next(self.batches)\n"
        "rows = Counted(given())",
        "next(rows)",
        ["`rows.count` (of a Counted)"],
    ),
    "nothing that its functions only read, or set anew": (
        "last = 0\ndef loss():\n    global last\n    last = random.random()\n    return last",
        "loss()",
        [],
    ),
    "nothing that stays": ("fixed, model = [1], torch.nn.Linear(2, 2)", "model(torch.ones(2))", []),
    "nothing that a step makes": ("batch = []", "batch = [random.random()]; batch.append(1)", []),
    "nothing of a tracked loader": (
        "class Noise:\n    def __init__(self):\n        self.random = torch.Generator()\n"
        "order, noise = torch.Generator(), Noise()\n"
        "class Data(list):\n    transform = None\n"
        "data = Data([1, 2])\ndata.transform = noise\n"
        "loader = track(DataLoader(data, shuffle=True, generator=order))",
        "torch.rand(1, generator=order); torch.rand(1, generator=noise.random)",
        [],
    ),
    "nothing that a tracked loader reads through a partial": (
        "import functools\nnoise = torch.Generator()\n"
        "loader = track(DataLoader([1], collate_fn=functools.partial(torch.rand, generator=noise)))",
        "torch.rand(1, generator=noise)",
        [],
    ),
    "nothing of a library's object": (
        "from string import Formatter\nclass Reader:\n    pass\nreader = Reader()\nreader.words = Formatter()\n"
        "reader.words.read = [0]",
        "reader.words.read[0] += 1",
        [],
    ),
    "what a library's object fills, as a replay buffer": (
        "from string import Formatter\nbuffer = Formatter()\n"
        "buffer.rows, buffer.times, buffer.seen = np.zeros(4), np.zeros(4), 0",
        "buffer.rows[index] = 1; buffer.times = buffer.times + 1; buffer.seen += 1",
        ["`buffer.rows` (of a Formatter)"],
    ),
    "a world of a library, within its wrappers": (
        "import argparse\nkind = type('Env', (argparse.Namespace,), dict(__module__='argparse', step=0, reset=0))\n"
        "env = kind(env=kind(env=kind(steps=0)), drawn=0)",
        "env.env.env.steps += 1",
        ["`env.env` (of a Env)"],
    ),
    "nothing that is saved": ("ema = saved[0].inner", "ema.add_(1.0)", []),
}

OWN_FILE = f"{Path(resume_adapters.__file__).parent}/given.py"
OWN: dict[str, Any] = {}
exec(compile("def given():\n    yield from [1, 2, 3, 4]", OWN_FILE, "exec"), OWN)

NAMES = {
    "given": OWN["given"],
    "functools": functools,
    "itertools": itertools,
    "torch": torch,
    "np": np,
    "random": random,
    "deque": deque,
    "DataLoader": DataLoader,
    "track": track,
}


class Part:
    """Saves what it wraps."""

    def __init__(self) -> None:
        self.inner = torch.zeros(2)


@pytest.mark.parametrize("in_function", [False, True])
@pytest.mark.parametrize("what", NAMED)
def test_what_a_loop_changes(what: str, in_function: bool, tmp_path: Path) -> None:
    before, body, found = NAMED[what]
    loop = f"for index in range(4):\n    {body}\n    look(index)\n"
    if in_function:
        lines = "".join(f"    {line}\n" for line in loop.splitlines())
        loop = f"def train():\n    batch = None\n{lines}train()\n"
    script = tmp_path / "train.py"
    script.write_text(f"{before}\n{loop}")
    saved = [Part()]
    variables = ScriptVariables(lambda: saved)

    def look(index: int) -> None:
        if index == 0:
            variables.begin(saved)
        else:
            variables.compare()

    runpy.run_path(str(script), {**NAMES, "look": look, "saved": saved})
    assert sorted(variables.changed([])) == sorted(found)
    assert variables.changed(found) == []
    names = {each.split("`")[1].rpartition(".")[2] for each in found}
    assert variables.changed([], names) == []


MODULE = """
import functools, random
table, fixed, noise, batch = {}, [1], random.Random(0), []
class Meter:
    total = 0
    @staticmethod
    def update(seen=[]):
        seen.append(1)
class Norm:
    def __init__(self):
        self.mean = 0
norm = Norm()
def counted(function):
    calls = {"number": 0}
    @functools.wraps(function)
    def inner():
        calls["number"] += 1
        return function()
    return inner
def rates():
    last = 0
    def rate():
        nonlocal last
        last = last * 2 + 1
    return rate
@counted
def weigh(*, rows={}):
    global batch
    batch = [random.random()]
    Meter.total, norm.mean, rows[len(rows)] = Meter.total + 1, norm.mean + 1, 1
    table[len(table)] = noise.random()
    Meter.update()
    own()
own = counted(rates())
"""


SCRIPT = """
from resume_adapters.core.observed.variables import ScriptVariables
import losses
variables = ScriptVariables(list)
variables.begin([])
losses.weigh()
variables.compare()
print(*variables.changed([]), sep=chr(10))
"""


def test_what_other_modules_of_a_script_keep_is_named(tmp_path: Path) -> None:
    (tmp_path / "losses.py").write_text(MODULE)
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    named = {each.split("`")[1] for each in done.stdout.splitlines()}
    kept = ("table", "noise", "Meter.total", "seen", "norm.mean", "calls", "rows", "last")
    assert named == {f"losses.{name}" for name in kept}


class Average:
    """A hook that keeps something."""

    def __init__(self) -> None:
        self.mean = 0.0

    def __call__(self, module: Any, given: Any, made: Any) -> None:
        self.mean = self.mean + float(made.detach().mean())

    def count(self, gradient: torch.Tensor) -> None:
        self.gradients = float(gradient.sum())


def counting(seen: dict[str, int], name: str) -> Any:
    def hook(*given: Any) -> None:
        seen[name] = seen.get(name, 0) + 1

    return hook


def hooked(kind: str) -> tuple[Any, Any, Any]:
    """Return a model, an optimizer and a schedule, of which one has a hook of the script."""
    model, average = torch.nn.Sequential(torch.nn.Linear(2, 2)), Average()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook = counting({}, "calls")
    {
        "module": lambda: model[0].register_full_backward_hook(hook),
        "parameter": lambda: model[0].weight.register_post_accumulate_grad_hook(hook),
        "optimizer": lambda: optimizer.register_step_post_hook(hook),
        "method": lambda: model[0].bias.register_hook(average.count),
        "object": lambda: model[0].register_forward_hook(average),
    }.get(kind, lambda: None)()
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: hook() or 1.0)


@pytest.mark.parametrize("kind", ["module", "parameter", "optimizer", "method", "object", "given"])
def test_what_hooks_keep_is_named(kind: str) -> None:
    saved = model, optimizer, schedule = hooked(kind)
    variables = ScriptVariables(lambda: saved)
    variables.begin(saved)
    model(torch.ones(1, 2, requires_grad=True)).sum().backward()
    optimizer.step()
    if kind == "given":
        schedule.step()
    variables.compare()
    found = {"method": "`Average.gradients` (of a Average)", "object": "`Average.mean` (of a Average)"}
    assert variables.changed([]) == [found.get(kind, "`seen` (a dict)")]


def test_what_hooks_keep_that_hangs_on_a_saved_module_is_saved_too() -> None:
    inner, average, seen = torch.nn.Linear(2, 2), Average(), {"calls": 0}
    inner.average, inner.seen = average, seen  # type: ignore[assignment]
    inner.register_forward_hook(average)
    inner.register_forward_hook(counting(seen, "calls"))
    saved = [torch.nn.Sequential(torch.nn.Sequential(inner))]
    variables = ScriptVariables(lambda: saved)
    variables.begin(saved)
    saved[0](torch.ones(1, 2))
    variables.compare()
    assert seen["calls"] == 1 and variables.changed([]) == []


def test_code_is_looked_at_nearest_first_and_not_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [*code.code_among([counting, Average])][:2] == [counting, Average]
    monkeypatch.setattr(code, "_MOST", 1)
    assert [*code.code_among([counting, Average, hooked])] == [counting, Average]


class Settings(dict[str, Any]):
    """Raises where it is asked for an attribute that it lacks."""

    def __getattr__(self, name: str) -> Any:
        return self[name]

    def __call__(self, *given: Any) -> None:
        self["calls"] += 1


class Configured:
    settings = Settings(calls=0)


def test_nothing_of_a_script_is_asked_for_attributes() -> None:
    model, configured = torch.nn.Linear(2, 2), Configured()
    model.register_forward_hook(configured.settings)
    variables = ScriptVariables(lambda: [model])
    variables.begin([model])
    model(torch.ones(1, 2))
    variables.compare()
    assert Configured.settings["calls"] == 1
    assert variables.changed([]) == ["`Settings` (a Settings)"]


class Counting(torch.nn.Linear):
    calls = ()


def test_what_a_module_within_a_saved_one_holds_is_saved_too() -> None:
    inner = Counting(2, 2)
    outer = torch.nn.Sequential(torch.nn.Sequential(inner))
    variables = ScriptVariables(lambda: [outer])
    variables.begin([outer])
    inner.calls = (1,)
    variables.compare()
    assert variables.changed([]) == []


class Stopper:
    """Stops early, as the one in Accelerate's examples."""

    def __init__(self) -> None:
        self.count, self.lowest, self.patience, self.losses = 0, float("inf"), 3, [1.0]
        self.global_step = self.resumed = 0

    def check(self, loss: float) -> None:
        self.count, self.lowest, self.last = self.count + 1, min(self.lowest, loss), loss
        self.losses.append(loss)


def test_what_an_object_of_the_script_counts_is_found_also_late() -> None:
    stopper, saved, run = Stopper(), Stopper(), Stopper()
    stopper.resumed = run.global_step
    variables = ScriptVariables(lambda: [saved, run])
    variables.begin([saved, run])
    for save in range(1, 9):
        variables.compare()
        if save == 5:
            stopper.check(0.5)
            saved.check(0.5)
        assert bool(variables.changed([])) is (save == 8)
    found = [f"`stopper.{name}` (of a Stopper)" for name in ("count", "lowest", "losses", "last")]
    assert variables.changed([]) == found
    assert variables.changed([], {"losses"}) == [each for each in found if "losses" not in each]
    assert variables.changed(found[:1]) == found[1:]


def test_a_script_without_a_source_is_left_alone() -> None:
    variables = ScriptVariables(list)
    source = "rows = []\nfor _ in range(2):\n    rows.append(1)\n    look()\n"
    exec(compile(source, "/gone.py", "exec"), {"look": lambda: (variables.compare(), variables.begin([]))})
    variables.compare()
    assert not any("rows" in each for each in variables.changed([]))


def test_what_the_variables_of_a_loop_hold_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    launch = Launch(tmp_path, epochs=1)
    data, noise = launch.loader(), torch.Generator()
    launch.loop.memory["kept"] = kept = [0]
    with caplog.at_level("INFO", "resume_adapters"), launch.loop:
        for _ in launch.loop.epochs(1):
            for batch in launch.loop.batches(data):
                kept[0] += 1
                launch._step(batch + torch.rand((), generator=noise))
    assert caplog.text.count("`noise` (a Generator)") == 1
    assert "`kept`" not in caplog.text and "kept" in launch.loop.memory


class Noisy(TensorDataset):
    """Adds what a generator of its own draws."""

    noise = random.Random(0)

    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__(*tensors)
        self.generator = torch.Generator()

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)[0] + torch.rand((), generator=self.generator) + self.noise.random()


@pytest.mark.parametrize("handed", [False, True])
def test_workers_that_outlive_a_validation_are_named_or_saved(
    handed: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    launch = Launch(tmp_path, epochs=1)
    data = launch.loader()
    held_out = DataLoader(Noisy(torch.rand(4, 4)), batch_size=2, num_workers=1, persistent_workers=True)
    with caplog.at_level("INFO", "resume_adapters"), launch.loop:
        for _ in launch.loop.epochs(1):
            for batch in launch.loop.batches(data):
                launch._step(batch)
                assert len([*(launch.loop.batches(held_out) if handed else held_out)]) == 2
    assert ("persistent workers of a loader of `Noisy`" in caplog.text) is not handed
    held_out._iterator = None


@pytest.mark.parametrize("handed", [False, True])
def test_what_the_data_of_a_validation_draw_from_is_named_or_saved(
    handed: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    launch = Launch(tmp_path, epochs=1)
    data, order = launch.loader(), torch.Generator()
    held_out = DataLoader(Noisy(torch.rand(4, 4)), batch_size=2, shuffle=True, generator=order)
    with caplog.at_level("INFO", "resume_adapters"), launch.loop:
        for _ in launch.loop.epochs(1):
            for batch in launch.loop.batches(data):
                launch._step(batch)
                assert len([*(launch.loop.batches(held_out) if handed else held_out)]) == 2
    named = [each for each in ("`generator of Noisy` (a Generator)", "Noisy.noise` (a Random)") if each in caplog.text]
    assert len(named) == 2 * (not handed)
    assert ("`order` (a Generator)" in caplog.text) is not handed

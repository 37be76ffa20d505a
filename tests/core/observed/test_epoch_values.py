"""What an epoch of a script makes of what is trained before its batches is found in its source and its variables."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from resume_adapters.core.observed.epoch_values import made_in_epoch

from plain_torch import Launch

FOUND: dict[str, tuple[str, list[str]]] = {
    "labels that a model gives, by way of another variable": ("given = model(data)\nlabels = given > 0", ["labels"]),
    "a copy of the model, and one of its weights": (
        "old, rows = copy.deepcopy(model), [each.clone() for each in model.parameters()]",
        ["old", "rows"],
    ),
    "what is made by an object that holds the model, or of a list of its parameters": (
        "rollout = agent.collect(data)\nnorm = float(sum(each.norm() for each in parameters))",
        ["rollout", "norm"],
    ),
    "a loader of such data, and a dict": (
        "loader = torch.utils.data.DataLoader(model.first(data))\nmeans = {'a': model(data).mean()}",
        ["loader", "means"],
    ),
    "what is filled by calls, by items and by sums": (
        "labels, total, table = [], 0.0, torch.zeros(4)\n"
        "labels.append(model(data))\ntotal += model(data).sum().item()\n"
        "table[0] = model(data).mean()",
        ["labels", "total", "table"],
    ),
    "nothing of the parameters themselves, or of settings of the model": (
        "held, alias = [list(model.parameters()), model.first.bias.detach()], model\n"
        "again = nn.Sequential(model.first)\n"
        "table, count, name = torch.rand(model.width), len(parameters), str(model)",
        [],
    ),
    "nothing that follows from no model": (
        "mask, gone = torch.rand(4), agent.nothing if False else 0.5\nheld = [held, model]\nheld.append(held)",
        [],
    ),
    "nothing that the run keeps": (
        "if memory.get('epoch') != epoch:\n    memory.update(epoch=epoch, labels=model(data))\n"
        "labels = memory['labels']\n"
        "other = run.memory['labels'] * model.width",
        [],
    ),
    "nothing that goes into a part that is saved": ("teacher.load_state_dict(model.state_dict())", []),
}

_SCRIPT = """
import copy
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.width = nn.Linear(4, 4), 4

    def forward(self, rows):
        return self.first(rows)

class Agent:
    def __init__(self, model):
        self.model = model

    def collect(self, data):
        return self.model(data)

model, teacher = Model(), Model()
agent, parameters, data, memory = Agent(model), list(model.parameters()), torch.rand(4), run.memory
saved.extend([model, teacher, memory])
labels = old = rows = rollout = norm = loader = means = total = table = held = alias = again = count = mask = None
"""

_READ = (
    "print(labels, old, rows, rollout, norm, loader, means, total, table, held, alias, again, count, name, mask, other)"
)

_AT_THE_TOP = """
name = other = gone = None
for epoch in run.epochs(1):
    {begin}
    for batch in run.batches(data):
        {read}
        step()
"""

_IN_A_FUNCTION = """
def train(epoch):
    labels = old = rows = rollout = norm = loader = means = total = table = held = alias = again = count = mask = None
    name = other = gone = None
    {begin}
    for batch in run.batches(data):
        {read}
        step()

for epoch in run.epochs(1):
    train(epoch)
"""


class Run:
    """What a script calls."""

    def __init__(self) -> None:
        self.memory: dict[str, Any] = {"labels": 1}

    def epochs(self, count: int) -> Iterator[int]:
        yield from range(count)

    def batches(self, data: Any) -> Any:
        return data


def found_in(tmp_path: Path, source: str) -> list[str]:
    script = tmp_path / "train.py"
    script.write_text(source)
    saved: list[Any] = []
    found: list[list[str]] = []
    runpy.run_path(str(script), {"step": lambda: found.append(made_in_epoch(saved)), "run": Run(), "saved": saved})
    return found[0]


@pytest.mark.parametrize("script", [_AT_THE_TOP, _IN_A_FUNCTION], ids=["at the top", "in a function"])
@pytest.mark.parametrize("what", FOUND)
def test_what_an_epoch_begins_with(what: str, script: str, tmp_path: Path) -> None:
    begin, names = FOUND[what]
    filled = script.format(begin=begin.replace("\n", "\n    "), read=_READ)
    found = found_in(tmp_path, _SCRIPT + filled)
    assert [each.split("`")[1] for each in found] == names
    assert all("(train.py:" in each for each in found)


def test_nothing_that_no_batch_reads_or_that_no_epoch_makes(tmp_path: Path) -> None:
    assert found_in(tmp_path, _SCRIPT + _AT_THE_TOP.format(begin="labels = model(data)", read="pass")) == []
    assert found_in(tmp_path, _SCRIPT + _AT_THE_TOP.format(begin="pass", read="labels = model(data)")) == []
    unwrapped = _AT_THE_TOP.replace("run.epochs(1)", "range(1)").format(begin="labels = model(data)", read=_READ)
    assert found_in(tmp_path, _SCRIPT + unwrapped) == []


def test_a_run_names_it_at_its_first_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    launch = Launch(tmp_path, epochs=1)
    data = launch.loader()
    with caplog.at_level("INFO", "resume_adapters"), launch.loop:
        for _ in launch.loop.epochs(1):
            with torch.no_grad():
                moved = launch.framework.model(torch.ones(4, 1)).mean()
            for batch in launch.loop.batches(data):
                launch._step(batch + moved)
    assert caplog.text.count("`moved` (test_epoch_values.py:") == 1
    assert "an epoch begins by making these of what is trained" in caplog.text

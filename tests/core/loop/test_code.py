"""What a training changes where only code leads: the object of a method, a variable of an outer function."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from code_that_holds import HOLDING
from resume_adapters.loop import register_for_resume

PLACES = ["a transform", "a collate function", "the rate of a schedule", "an inner one", "a model"]


class Interrupted(Exception):
    pass


class Samples(torch.utils.data.Dataset[Any]):
    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index / 24]) if self.transform is None else self.transform(torch.tensor([index / 24]))


class Model(torch.nn.Module):
    def __init__(self, after: Any) -> None:
        super().__init__()
        self.layer, self.after = torch.nn.Linear(1, 1), after

    def forward(self, rows: torch.Tensor) -> Any:
        loss = self.layer(rows).square().mean()
        return loss if self.after is None else self.after(loss)


def schedule_of(optimizer: Any, rate: Any, *, is_inner: bool) -> Any:
    made = torch.optim.lr_scheduler.LambdaLR(optimizer, rate or (lambda step: 1.0))
    if not is_inner:
        return made
    later = torch.optim.lr_scheduler.ConstantLR(optimizer)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [made, later], milestones=[15])


def train(directory: Path, kind: str, place: str, kill: int) -> list[float]:
    """Train three epochs of 6 steps, and change what code holds after each; return the losses."""
    torch.manual_seed(0)
    code, change = HOLDING[kind]()
    given = {name: code if name == place else None for name in PLACES}
    model = Model(given["a model"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    rate = given["the rate of a schedule"] or given["an inner one"]
    schedule = schedule_of(optimizer, rate, is_inner=place == "an inner one")

    def collate(samples: Any) -> Any:
        rows = torch.stack(samples)
        return rows if given["a collate function"] is None else given["a collate function"](rows)

    loader = torch.utils.data.DataLoader(Samples(given["a transform"]), 4, shuffle=True, collate_fn=collate)
    run = register_for_resume(directory, model=model, optimizer=optimizer, schedule=schedule, save_every=2)
    losses: list[float] = []
    try:
        for _ in run.epochs(3):
            for batch in run.batches(loader):
                loss = model(batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                losses.append(loss.item())
                run.step()
                if run.global_step == kill:
                    raise Interrupted
            change()
    except Interrupted:
        run._run.close()
    return losses


@pytest.mark.parametrize(("place", "kind"), itertools.product(PLACES, HOLDING))
def test_what_code_holds_is_that_of_a_run_that_was_not_killed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str, kind: str
) -> None:
    expected = train(tmp_path / "whole", kind, place, -1)
    early = train(tmp_path / "killed", kind, place, 9)
    middle = train(tmp_path / "killed", kind, place, 13)
    late = train(tmp_path / "killed", kind, place, -1)
    assert early == expected[:9] and middle == expected[8:13] and late == expected[12:]
    named = [line.split(":", 1)[0] for line in caplog.text.split("MISSING: ")[1:]]
    assert set(named) == {"`losses` (a list)"}

"""Plain tensors that an optimizer trains: poses beside a model, an image, weights in another precision."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from resume_adapters.core.loop import tensors
from resume_adapters.errors import UnsupportedSetting
from resume_adapters.loop import register_for_resume


class Interrupted(Exception):
    pass


def poses(directory: Path) -> tuple[Any, Callable[[], torch.Tensor], list[torch.Tensor]]:
    """Both in one optimizer."""
    model, given = torch.nn.Linear(3, 1), torch.zeros(4, 3, requires_grad=True)
    optimizer = torch.optim.Adam([*model.parameters(), given], lr=0.1)

    def update() -> torch.Tensor:
        loss = model(given + torch.rand(4, 3)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    run = register_for_resume(directory, model=model, optimizer=optimizer, save_every=2)
    return run, update, [given, model.weight]


def image(directory: Path) -> tuple[Any, Callable[[], torch.Tensor], list[torch.Tensor]]:
    """No model is trained, and the second optimizer has tensors of the first."""
    given = torch.zeros(4, 3, requires_grad=True)
    optimizer = torch.optim.LBFGS([given], max_iter=2)
    other = torch.optim.SGD([given], lr=0.1)

    def update() -> torch.Tensor:
        wanted = torch.rand(4, 3)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (given - wanted).square().sum()
            loss.backward()
            return loss

        loss: Any = optimizer.step(closure)
        other.step()
        return loss

    return register_for_resume(directory, optimizer=optimizer, other=other, save_every=2), update, [given]


def copied(directory: Path) -> tuple[Any, Callable[[], torch.Tensor], list[torch.Tensor]]:
    """The optimizer trains copies of the weights in float32."""
    model = torch.nn.Linear(3, 1).bfloat16()
    given = [each.detach().float().requires_grad_() for each in model.parameters()]
    optimizer = torch.optim.AdamW(given, lr=0.1)

    def update() -> torch.Tensor:
        model.zero_grad()
        loss = model(torch.rand(4, 3, dtype=torch.bfloat16)).square().mean()
        loss.backward()
        for master, each in zip(given, model.parameters(), strict=True):
            master.grad = each.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, each in zip(given, model.parameters(), strict=True):
                each.copy_(master)
        return loss

    return register_for_resume(directory, model=model, optimizer=optimizer, save_every=2), update, given


def train(directory: Path, kind: Callable[[Path], Any], until: int = 8) -> list[torch.Tensor]:
    torch.manual_seed(0)
    run, update, trained = kind(directory)
    with run:
        for step in run.steps(8):
            loss = update()
            run.step(loss=loss)
            if step + 1 == until < 8:
                raise Interrupted
    return trained


@pytest.mark.parametrize("kind", [poses, image, copied])
def test_they_go_on_where_they_were(kind: Any, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", kind)
    with pytest.raises(Interrupted):
        train(tmp_path / "run", kind, until=5)
    resumed = train(tmp_path / "run", kind)
    assert all(torch.equal(one, other) for one, other in zip(whole, resumed, strict=True))
    assert all(each.is_leaf and each.requires_grad for each in resumed)


def test_parameters_of_a_module_that_was_not_given_are_refused(tmp_path: Path) -> None:
    """It may have more to save, such as running means."""
    with pytest.raises(UnsupportedSetting, match="no model that one of them trains"):
        register_for_resume(tmp_path, optimizer=torch.optim.Adam(torch.nn.BatchNorm1d(2).parameters()))


def test_where_there_are_several_processes_none_are_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may have trained others."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    assert len(tensors.are_saved([optimizer])) == 1
    monkeypatch.setattr(tensors, "current_world_size", lambda: 2)
    assert tensors.are_saved([optimizer]) == [] == [*tensors.as_part([optimizer])]

"""Which files of a framework a resume could load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from resume_adapters.core.checkpoint.native_files import require_loadable
from resume_adapters.errors import NotSerialisable


class Settings(dict[str, Any]):
    """A container of its own class."""


class Plain:
    def __init__(self) -> None:
        self.rate = 0.1


def test_a_container_that_torch_was_told_of_and_cannot_fill_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    """Where it is read."""
    file = tmp_path / "model.pt"
    torch.save({"settings": Settings(rate=0.1), "weights": torch.ones(2)}, file)
    with pytest.raises(
        NotSerialisable, match=r"model.pt holds .*Settings \(at settings\), which would have to run code"
    ):
        require_loadable([file], lambda key: True)
    require_loadable([file], lambda key: False)
    with (
        torch.serialization.safe_globals([Settings]),
        pytest.raises(NotSerialisable, match=r"cannot be loaded again.* add_safe_globals.*fills no .*Settings"),
    ):
        require_loadable([file], lambda key: True)
    with torch.serialization.safe_globals([Settings]):
        require_loadable([file], lambda key: False)


class Fragile:
    """An object that does not take its state back."""

    def __init__(self) -> None:
        self.rate = 0.1

    def __setstate__(self, state: Any) -> None:
        raise ValueError("the rate is missing")


def test_an_object_that_torch_was_told_of_and_cannot_be_made_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    torch.save({"fragile": Fragile()}, file)
    with (
        torch.serialization.safe_globals([Fragile]),
        pytest.raises(NotSerialisable, match=r"cannot be loaded again.* add_safe_globals.*the rate is missing"),
    ):
        require_loadable([file], lambda key: True)


def test_an_older_format_does_not_list_what_it_holds_and_is_left_to_torch(tmp_path: Path) -> None:
    files = [tmp_path / "older.pt", tmp_path / "model.pt"]
    torch.save({"plain": Plain()}, files[0], _use_new_zipfile_serialization=False)
    require_loadable(files[:1], lambda key: True)
    torch.save({"plain": Plain()}, files[1])
    with pytest.raises(NotSerialisable, match=r"model.pt holds .*Plain"):
        require_loadable(files, lambda key: True)


def test_an_object_that_torch_was_told_of_is_no_reason_to_refuse(tmp_path: Path) -> None:
    files = [tmp_path / "model.pt", tmp_path / "list.pt"]
    torch.save({"plain": Plain(), "weights": torch.ones(2)}, files[0])
    torch.save([1, torch.ones(2)], files[1])
    with pytest.raises(NotSerialisable, match=r"Plain \(at plain\)"):
        require_loadable(files, lambda key: True)
    require_loadable(files, lambda key: False)
    with torch.serialization.safe_globals([Plain]):
        require_loadable(files, lambda key: True)

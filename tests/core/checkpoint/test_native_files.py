"""Which files of a framework a resume could load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from resume_adapters.core.checkpoint.native_files import copy_keys, require_loadable
from resume_adapters.errors import CheckpointDamaged, NotSerialisable


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


class Noisy:
    """What runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return print, ("this must not run",)


def test_some_keys_of_a_file_are_copied_as_data_whatever_the_others_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = {"a": torch.arange(6.0)[2:], "b": torch.ones(2, dtype=torch.bfloat16)}
    content = {"weights": weights, "rate": np.float64(0.5), "path": Path("x"), "callbacks": Noisy()}
    torch.save(content, tmp_path / "old.pt")
    before = torch.serialization.get_safe_globals()
    copy_keys(tmp_path / "old.pt", tmp_path / "new.pt", lambda key: key != "callbacks")
    assert torch.serialization.get_safe_globals() == before
    copied = torch.load(tmp_path / "new.pt", weights_only=False)
    assert copied.keys() == {"weights", "rate", "path"} and (copied["rate"], copied["path"]) == (0.5, Path("x"))
    assert all(torch.equal(copied["weights"][name], weights[name]) for name in weights)
    with pytest.raises(NotSerialisable, match=r"builtins\.print \(at callbacks\), which is not data"):
        copy_keys(tmp_path / "old.pt", tmp_path / "new.pt", lambda key: True)
    (tmp_path / "old.pt").write_bytes(b"torn")
    with pytest.raises(CheckpointDamaged, match=r"old\.pt cannot be read"):
        copy_keys(tmp_path / "old.pt", tmp_path / "new.pt", lambda key: True)
    assert "must not run" not in capsys.readouterr().out

"""A file that torch pickled is data: no code that it names is run."""

from __future__ import annotations

import decimal
import os
import pickle
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from resume_adapters.core.state import safe_load


class Code:
    """Makes a directory where it is unpickled freely."""

    def __init__(self, directory: Path) -> None:
        self.directory = str(directory)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.directory,)


@pytest.mark.parametrize("free", [None, "1"])
def test_no_code_is_run_whoever_asks_for_it(free: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the environment asks for it, of which torch would make an error."""
    if free is not None:
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", free)
    before = dict(os.environ)
    torch.save({"a": Code(tmp_path / "executed")}, tmp_path / "file.pt")
    with safe_load.data_only([]), pytest.raises(pickle.UnpicklingError, match="mkdir"):
        torch.load(tmp_path / "file.pt", weights_only=False)
    assert not (tmp_path / "executed").exists()
    assert dict(os.environ) == before
    torch.load(tmp_path / "file.pt", weights_only=False)
    assert (tmp_path / "executed").exists(), "the file must be one that runs code"


def test_one_context_may_be_within_another(tmp_path: Path) -> None:
    torch.save(decimal.Decimal(3), tmp_path / "file.pt")
    with safe_load.data_only([decimal.Decimal]):
        with safe_load.data_only([decimal.Decimal]):
            pass
        assert torch.load(tmp_path / "file.pt", weights_only=False) == 3
    assert decimal.Decimal not in torch.serialization.get_safe_globals()
    with safe_load.data_only([]), pytest.raises(pickle.UnpicklingError, match="Decimal"):
        torch.load(tmp_path / "file.pt", weights_only=False)


class Call(Code):
    """Does so through a module that torch does not block."""

    def __reduce__(self) -> Any:
        return subprocess.Popen, (["touch", self.directory],)


class Thing:
    """An object with state."""

    def __init__(self) -> None:
        self.size = 3

    def __setstate__(self, state: Any) -> None:
        raise AssertionError("code of the class ran")


def test_a_class_stands_in_for_one_that_is_not_loaded(tmp_path: Path) -> None:
    torch.save([Thing(), Call(tmp_path / "executed"), decimal.Decimal("1.5")], tmp_path / "file.pt")
    names = torch.serialization.get_unsafe_globals_in_checkpoint(tmp_path / "file.pt")
    with safe_load.data_only([safe_load.stand_in(name) for name in names]):
        thing, code, number = torch.load(tmp_path / "file.pt")
    assert (type(thing).__name__, thing.arguments, thing.state) == ("Thing", (), {"size": 3})
    assert (type(code).__name__, code.arguments, code.state) == ("Popen", (["touch", code.arguments[0][1]],), None)
    assert number.arguments == ("1.5",)
    assert not (tmp_path / "executed").exists()


class Loaded:
    """A class that is loaded, and names one that is not."""

    kind = safe_load.stand_in("decimal.Decimal")


def test_stand_ins_are_found_wherever_they_are(tmp_path: Path) -> None:
    """In an array of objects too, where somebody has told torch of these; and a class that is not loaded is one."""
    things = np.array([1.5, Thing()], dtype=object)
    file = tmp_path / "file.pt"
    torch.save({"model": {"things": things, "kind": decimal.Decimal}, "other": Call(tmp_path / "executed")}, file)
    classes = [*safe_load.data_classes(), type(np.dtype(object))]
    with safe_load.data_only(classes), safe_load.standing_in([file]):
        content = torch.load(file)
    assert safe_load.stand_ins(content, lambda place: place.startswith("model")) == {
        "decimal.Decimal": "model.kind",
        f"{Thing.__module__}.Thing": "model.things.1",
    }
    assert not (tmp_path / "executed").exists()
    assert safe_load.stand_ins({"kind": Loaded}, lambda key: True) == {}, "what a class names is not in the file"

"""A file that torch pickled is data: no code that it names is run."""

from __future__ import annotations

import decimal
import os
import pickle
from pathlib import Path
from typing import Any

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

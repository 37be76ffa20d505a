"""Scripts of the libraries that build on the Trainer: killed three times, they end as they do undisturbed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from strangers import HERE, ends_as_undisturbed

SCRIPTS = {
    "mixtral": "transformers",
    "vit": "transformers",
    "seq2seq": "transformers",
    "examples_of_4": "transformers",
    "masked": "transformers",
    "weighted": "transformers",
    "sentences": "sentence_transformers",
    "sentences_datasets": "sentence_transformers",
    "sentences_nested": "sentence_transformers",
    "cross_encoder": "sentence_transformers",
    "sparse_encoder": "sentence_transformers",
    "sft": "trl",
    "dpo": "trl",
    "grpo": "trl",
    "reward": "trl",
    "kto": "trl",
    "rloo": "trl",
    "orpo": "trl",
    "online_dpo": "trl",
    "bema": "trl",
}
"""The library that each script needs."""

APART_FROM = {"vit": ("files",)}
"""What differs since the bare Trainer does not load the best weights that it has saved under other names."""


@pytest.mark.parametrize("name", SCRIPTS)
def test_killed_three_times_it_ends_as_undisturbed(name: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(SCRIPTS[name]) is None:
        pytest.skip(f"{SCRIPTS[name]} is not installed")
    ends_as_undisturbed(HERE / "scripts" / f"{name}.py", tmp_path, seed=17, apart_from=APART_FROM.get(name, ()))


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_sharded_over_two_processes(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATE_DICT_TYPE", kind)
    ends_as_undisturbed(HERE / "scripts" / "fsdp.py", tmp_path, seed=17, ranks=2)


@pytest.mark.parametrize("kind", ["transformers", "two", "prefix", "MLP", "LSTM"])
def test_adapters(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of some peft saves a part, of others what it computes of them, and transformers loads none of its own."""
    pytest.importorskip("peft")
    monkeypatch.setenv("ADAPTER", kind)
    ends_as_undisturbed(HERE / "scripts" / "adapters.py", tmp_path, seed=17)

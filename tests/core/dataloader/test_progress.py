"""The digest of a batch that is fetched, and not used yet."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from resume_adapters.core.dataloader.progress import BatchDigest
from resume_adapters.core.state import encoding


def batch() -> dict[str, Any]:
    return {
        "inputs": torch.arange(4.0),
        "labels": [torch.ones(2), ("a", 1, None)],
        "rest": MappingProxyType({"b": 2.5}),
    }


def test_it_is_that_of_the_batch_as_it_was_fetched() -> None:
    fetched = batch()
    digest = BatchDigest(3, fetched)
    fetched.pop("labels")
    fetched["more"] = 1
    assert digest.to_tree() == [3, encoding.digest_of(batch())]


def test_it_is_not_known_once_training_has_changed_the_batch() -> None:
    fetched = batch()
    digest = BatchDigest(3, fetched)
    fetched["labels"][0].add_(1)
    assert digest.to_tree() is None


@pytest.mark.parametrize("value", [np.arange(3.0), torch.inference_mode()(torch.ones)(3)])
def test_what_may_change_unseen_is_looked_at_at_once(value: Any) -> None:
    fetched = {"value": value}
    expected = encoding.digest_of(fetched)
    digest = BatchDigest(0, fetched)
    with torch.inference_mode():
        fetched["value"] += 1
    assert digest.to_tree() == [0, expected]

"""What a script keeps is filled with what was saved, where it is."""

from __future__ import annotations

import torch

from resume_adapters.core.loop.repeated import refill


def test_containers_and_tensors_are_filled_where_they_are() -> None:
    history, hidden = [1, {"a": 2}], torch.zeros(2)
    inner, memory = history[1], {"history": history, "hidden": hidden, "new": 5, "changed": [torch.zeros(3)]}
    saved = {"history": [1, {"a": 3}, 4], "hidden": torch.ones(2), "changed": {"b": torch.ones(1)}, "count": 7}
    refill(memory, saved)
    assert memory["history"] is history and history == [1, {"a": 3}, 4] and history[1] is inner
    assert memory["hidden"] is hidden and hidden.tolist() == [1.0, 1.0]
    assert memory.keys() == saved.keys() and memory["count"] == 7 and memory["changed"]["b"].tolist() == [1.0]
    memory["changed"]["b"].zero_()
    history.append(8)
    assert saved["changed"]["b"].tolist() == [1.0] and saved["history"] == [1, {"a": 3}, 4]

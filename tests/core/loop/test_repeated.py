"""What a script keeps is filled with what was saved, where it is."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque

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


def test_containers_stay_what_they_are() -> None:
    saved = {
        "c": Counter(a=2),
        "o": OrderedDict(b=1),
        "d": defaultdict(list, {1: [2]}),
        "q": deque([1, 2], 2),
        "s": {1},
    }
    held = {"c": Counter(a=1, b=5), "q": deque([7], 2), "s": {3}}
    kept, memory = dict(held), dict(held)
    refill(memory, saved)
    assert memory == saved and [*map(type, memory.values())] == [*map(type, saved.values())]
    assert all(memory[name] is each for name, each in kept.items())
    memory["c"].update(["a"]), memory["d"][3].append(1), memory["q"].append(3), memory["s"].add(9)
    assert saved["c"] == Counter(a=2) and 3 not in saved["d"] and [*saved["q"]] == [1, 2] and saved["s"] == {1}
    assert memory["c"]["a"] == 3 and [*memory["q"]] == [2, 3]

"""A tree as bytes comes back as it was, and marked as it was."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
import pytest
import torch

from resume_adapters.core.state import encoding, rng
from resume_adapters.core.state.comparison import first_difference
from resume_adapters.core.state.packed import Packer, unpack
from resume_adapters.core.state.records import Deferred, Record, Stored
from resume_adapters.errors import NotSerialisable

TREE = {
    "rng": rng.capture(),
    "kinds": [(1, 2.5, None, True, "a\nb", b"bytes"), {3: "three"}, float("nan"), -5, [], {}],
    "arrays": [np.arange(4), np.float32(1.5), np.ones((2, 3))[:, ::2], np.empty((0, 2))],
    "tensors": [torch.tensor(1.5), torch.empty(0, 3), torch.ones(2, 3, dtype=torch.bfloat16), torch.tensor([True])],
    "views": [
        torch.arange(6).view(2, 3).t(),
        torch.ones(2, dtype=torch.complex64),
        torch.arange(9, dtype=torch.uint8)[::2],
    ],
    "marked": encoding.exact([deque([1], maxlen=3), Counter("aab"), OrderedDict(x=1)]),
}


def test_a_tree_comes_back() -> None:
    packed, large = Packer().pack(TREE)
    assert not large
    found = unpack(packed, [])
    assert first_difference(encoding.decode(*encoding.encode(TREE)), encoding.decode(*encoding.encode(found))) is None
    assert Packer().pack(found)[0] == packed
    assert [type(each) for each in found["kinds"]] == [type(each) for each in TREE["kinds"]]


@pytest.mark.parametrize(
    "value", [1 << 64, -(1 << 70), {"nested": [1 << 80, (2,)]}, np.random.PCG64(1).state, ["\u00e4", 1 << 64, -7]]
)
def test_numbers_that_msgpack_lacks_come_back(value: Any) -> None:
    packer, large = Packer(), torch.rand(1 << 15)
    for _ in range(2):
        packed, left_out = packer.pack([value, Place(5, Later(), [value]), large])
        found, place, _ = unpack(packed, left_out)
        assert found == value and place["inner"] == [value] and place["number"] == 5
        assert len(left_out) == 1


def test_a_single_value_is_a_tree() -> None:
    assert unpack(Packer().pack(5)[0], []) == 5


def test_text_that_is_not_unicode_is_refused() -> None:
    for tree in ({"text": "\ud800"}, {"\ud800": 1}):
        with pytest.raises(NotSerialisable, match="not Unicode"):
            Packer().pack(tree)


def test_large_tensors_are_left_out() -> None:
    tensor = torch.rand(1 << 14)
    packed, large = Packer().pack({"large": tensor, "small": torch.ones(3), "in a tuple": (tensor,)})
    assert len(packed) < 1000 and [each.data_ptr() for each in large] == [tensor.data_ptr()] * 2
    others = [torch.rand(1 << 14), torch.rand(1 << 14)]
    found = unpack(packed, others)
    assert [each.data_ptr() for each in (found["large"], *found["in a tuple"])] == [each.data_ptr() for each in others]


class Later(Deferred):
    def to_tree(self) -> Any:
        raise AssertionError("it is not computed for this")


@dataclass
class Place(Record):
    index: Annotated[int, Stored("number")]
    digest: Later
    inner: list[Any]


def test_records_come_back_as_trees_without_what_is_computed_when_they_are_written() -> None:
    packed, _ = Packer().pack([Place(1, Later(), [Place(2, Later(), [])])])
    inner = {"number": 2, "digest": None, "inner": []}
    assert unpack(packed, []) == [{"number": 1, "digest": None, "inner": [inner]}]


def test_what_was_not_packed_is_refused() -> None:
    with pytest.raises(msgspec.MsgspecError, match="Expected `array`"):
        unpack(b"x", [])

"""State dict trees: out and back bit for bit, as data only."""

from __future__ import annotations

import collections
import copy
import enum
import math
import pickle
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from resume_adapters.core.state import encoding
from resume_adapters.core.state.comparison import first_difference, same_bits
from resume_adapters.errors import NotSerialisable

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip
NUMPY = ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32")
NUMPY += ("float64", "complex64", "complex128")


def through_disk(value: Any) -> Any:
    """Encode, write and read as a checkpoint does, and decode."""
    document, tensors = encoding.encode(value)
    return encoding.decode(document, load(save(tensors)) if tensors else {})


def same(one: Any, other: Any) -> bool:
    """Compare two trees strictly, without the code under test."""
    if isinstance(one, torch.Tensor):
        bits = [
            each.detach().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8) for each in (one, other)
        ]
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)
    if isinstance(one, np.ndarray | np.generic):
        return (
            type(one) is type(other)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and one.tobytes() == other.tobytes()
        )
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return [*map(repr, one)] == [*map(repr, other)] and all(map(same, one.values(), other.values()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return one.hex() == other.hex()
    return bool(one == other)


@st.composite
def torch_tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    size = torch.empty((), dtype=dtype).element_size()
    count = math.prod(shape)
    if dtype is torch.bool:
        made = torch.randint(0, 2, shape, generator=generator).bool()
    else:
        made = torch.randint(0, 256, (count * size,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)
    kind = draw(st.sampled_from(["plain", "transposed", "slice", "parameter", "expanded"]))
    if kind == "transposed" and made.dim() > 1:
        return made.transpose(0, 1)
    if kind == "slice" and made.dim() and made.shape[0] > 1:
        return made[1:]
    if kind == "expanded" and made.dim() == 0:
        return made.expand(3)
    if kind == "parameter" and (dtype.is_floating_point or dtype.is_complex):
        return torch.nn.Parameter(made)
    return made


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    dtype = np.dtype(draw(st.sampled_from(NUMPY)))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    content = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 256, math.prod(shape) * dtype.itemsize)
    made = (content % 2 if dtype.kind == "b" else content).astype(np.uint8).view(dtype)
    found = made.reshape(shape)
    kind = draw(st.sampled_from(["plain", "reversed", "fortran", "scalar"]))
    if kind == "scalar":
        return dtype.type(made[0] if made.size else 1)
    if kind == "reversed" and found.ndim:
        return found[::-1]
    return np.asfortranarray(found) if kind == "fortran" and found.ndim else found


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
plain_keys = st.one_of(texts, st.sampled_from(["$", "key", "of", "__metadata__", ""]))
any_keys = st.one_of(
    plain_keys, st.integers(), st.booleans(), st.none(), st.tuples(st.integers(), texts), st.binary(max_size=3)
)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64, 10**40]),
    st.floats(),
    texts,
    st.binary(max_size=9),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sets(st.integers(-3, 3), max_size=3),
    st.frozensets(st.integers(-3, 3), max_size=3),
    torch_tensors(),
    arrays(),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(plain_keys, inner, max_size=3),
        st.dictionaries(any_keys, inner, max_size=3),
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=300)
@given(trees)
def test_a_tree_comes_back_bit_for_bit(value: Any) -> None:
    back = through_disk(value)
    assert same(value, back)
    assert first_difference(value, back) is None
    assert encoding.digest_of(value) == encoding.digest_of(back)


@settings(deadline=None)
@given(trees)
def test_encoding_leaves_the_live_state_alone(value: Any) -> None:
    def fingerprint() -> str:
        document, tensors = encoding.encode(value)
        return encoding.digest(document, tensors)

    assert fingerprint() == fingerprint()


def test_tensors_that_share_a_storage_come_back_each_with_its_own() -> None:
    base = torch.arange(6.0)
    value = {
        "a": base,
        "again": base,
        "view": base[2:4],
        "matrix": base.view(2, 3),
        "t": base.view(2, 3).t(),
        "of": base.reshape(3, 2),
    }
    back = through_disk(value)
    assert same(value, back)
    assert len({each.untyped_storage().data_ptr() for each in back.values()}) == len(back)
    _, tensors = encoding.encode({"tiny": torch.zeros(1 << 16)[:2]})
    assert [each.untyped_storage().nbytes() for each in tensors.values()] == [8], "a view does not carry its base along"


def test_what_fills_its_memory_comes_back_in_its_layout() -> None:
    """Kernels are chosen by the layout, and the order of a sum is that of the memory."""
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    value = {
        "channels last": image,
        "of ones": torch.randn(5, 1, 1, 3).to(memory_format=torch.channels_last),
        "complex": torch.randn(2, 3, dtype=torch.complex128).t(),
        "turned": torch.randn(2, 3).t(),
        "array": np.asfortranarray(np.ones((2, 3))),
    }
    back = through_disk(value)
    assert first_difference(value, back) is None
    assert [back[name].stride() for name in list(value)[:-1]] == [value[name].stride() for name in list(value)[:-1]]
    assert back["array"].flags.f_contiguous
    assert through_disk(image[:, ::2]).is_contiguous(), "with its gaps it would be larger than what is in the file"
    assert encoding.digest_of(image) == encoding.digest_of(image.contiguous())


@pytest.mark.parametrize("strides", [[1 << 40, 1], [0, 0], [-1, 1], [1], "x"])
def test_a_layout_that_no_tensor_of_that_shape_has_is_refused(strides: Any) -> None:
    node = {"$": "tensor", "key": "0", "strides": strides}
    with pytest.raises(ValueError):
        encoding.decode(msgspec.json.encode(node), {"0": torch.zeros(2, 3)})


def test_conjugate_and_negative_views_come_back_by_value() -> None:
    number = torch.tensor([1 + 2j])
    for lazy in (number.conj(), number.conj().imag):
        back = through_disk(lazy)
        assert torch.equal(back, lazy)
        assert first_difference(back, lazy) is None


class Colour(enum.IntEnum):
    RED = 3


class Word(str):
    pass


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Colour.RED, 3),
        (Word("x"), "x"),
        (np.str_("x"), "x"),
        (collections.OrderedDict(a=1), {"a": 1}),
        (collections.defaultdict(int, {1: 2}), {1: 2}),
        (bytearray(b"xy"), b"xy"),
        (torch.Size([2, 3]), (2, 3)),
        ({frozenset({1}): 2}, {frozenset({1}): 2}),
        (-0.0, -0.0),
        (5e-324, 5e-324),
        (1.0, 1.0),
    ],
)
def test_a_kind_of_value_comes_back_as_the_plain_one_and_counts_as_equal(value: Any, plain: Any) -> None:
    back = through_disk(value)
    assert same(plain, back)
    assert first_difference(back, value) is None


class Ambush:
    ran = False

    def __reduce__(self) -> Any:
        return (setattr, (Ambush, "ran", True))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: Ambush(),
        lambda: len,
        lambda: 1j,
        lambda: memoryview(b"x"),
        lambda: np.array([Ambush()]),
        lambda: np.array(["text"]),
        lambda: np.array([1], dtype=">i4" if np.little_endian else "<i4"),
        lambda: np.zeros(1, dtype=[("a", int)]),
        lambda: np.datetime64("2020-01-01"),
        lambda: np.array([1], dtype=np.longdouble),
        lambda: torch.eye(2).to_sparse_csr(),
        lambda: torch.empty(2, device="meta"),
        lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8),
        lambda: "\ud800",
    ],
)
def test_what_is_not_data_is_refused_with_its_place(make: Callable[[], Any]) -> None:
    thing = make()
    with pytest.raises(NotSerialisable, match=r"^groups\.1\.inner "):
        encoding.encode({"groups": [0, {"inner": thing}]})
    assert encoding.digest_of([thing]) is None


def test_a_key_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(NotSerialisable):
        encoding.encode({"a": {"\udc80": 1}})


@pytest.mark.parametrize(
    "node",
    [
        {"$": "dtype", "of": "os"},
        {"$": "dtype", "of": "_dynamo"},
        {"$": "dtype", "of": "float33"},
        {"$": "object", "of": "os.system"},
        {"$": "tensor", "key": "absent"},
        {"$": "int", "of": "x"},
    ],
)
def test_decoding_refuses_what_encoding_never_writes_and_runs_nothing(node: Any) -> None:
    with pytest.raises((ValueError, KeyError)):
        encoding.decode(msgspec.json.encode(node), {})


def test_decoding_a_pickle_runs_nothing() -> None:
    with pytest.raises(ValueError, match="DecodeError"):
        encoding.decode(pickle.dumps(Ambush()), {})
    assert not Ambush.ran


@settings(deadline=None)
@given(torch_tensors(), st.data())
def test_one_flipped_bit_of_a_tensor_is_a_difference(tensor: torch.Tensor, data: st.DataObject) -> None:
    if tensor.numel() == 0 or tensor.dtype is torch.bool:
        return
    changed = tensor.detach().clone(memory_format=torch.contiguous_format)
    raw = changed.reshape(-1).view(torch.uint8)
    raw[data.draw(st.integers(0, raw.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert first_difference({"t": tensor}, {"t": changed}) is not None
    assert encoding.digest_of(tensor) != encoding.digest_of(changed)


def test_an_outline_has_the_key_of_each_tensor_and_all_other_values() -> None:
    tree = {
        "weights": [
            torch.zeros(2),
            np.zeros(3),
            np.float32(1.0),
            b"words",
            torch.zeros(1, dtype=torch.complex128),
            torch.ones(2, 3).t(),
        ],
        "rest": (1, {2: 1 << 70}, {"x"}, float("nan"), torch.float32),
    }
    document, tensors = encoding.encode(tree)
    found = encoding.outline(document)
    assert [each.key for each in found["weights"]] == [*tensors]
    assert all(isinstance(each, encoding.Reference) for each in found["weights"])
    assert first_difference(found["rest"], tree["rest"]) is None


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    "value",
    [
        Text("x"), enum.Enum("Colour", "RED"), torch.ones(2).to_sparse(), "\ud800", np.array(["a"]), object(),
        {"a": [bytearray(b"x")]}, torch.Size((1,)),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_would_come_back_as_something_else_is_refused_where_types_count(value: Any) -> None:
    with pytest.raises(NotSerialisable):
        encoding.exact(value)


def test_a_tensor_of_a_device_that_is_not_here_comes_back_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    marked = {"$": "device", "of": ["cuda", {"$": "tensor", "key": "0"}]}
    tensor = torch.ones(2)
    document = msgspec.json.encode(marked)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert encoding.decode(document, {"0": tensor}) is tensor
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
    assert encoding.decode(document, {"0": tensor}) is tensor, "a device of another kind"
    marked["of"] = ["meta", {"$": "tensor", "key": "0"}]
    assert encoding.decode(msgspec.json.encode(marked), {"0": tensor}).device.type == "meta"
    assert encoding.outline(document) == encoding.Reference("0")


def test_where_types_count_they_come_back() -> None:
    value = {
        "window": collections.deque([1, (2.0, None)], maxlen=4), "counts": collections.Counter("aab"),
        "ordered": collections.OrderedDict(b=1, a=torch.float16), "frozen": frozenset((1,)), "set": {b"x"},
        "lists": collections.defaultdict(list, {1: [torch.ones(1)]}), "none": collections.defaultdict(None),
        "array": np.arange(2), "parameter": torch.nn.Parameter(torch.ones(1)),
    }  # fmt: skip
    found = through_disk(encoding.exact(value))
    assert [type(each) for each in found.values()] == [*map(type, list(value.values())[:-1]), torch.Tensor]
    assert repr(found)[:-30] == repr(value)[: len(repr(found)) - 30]
    assert found["window"].maxlen == 4 and found["lists"].default_factory is list


def test_what_hangs_on_the_state_of_a_module_comes_back() -> None:
    """A module reads the versions there; tensordict has its batch size and its device there."""
    state = torch.nn.BatchNorm1d(2).state_dict()
    state._metadata["tensordict"] = {"batch_size": (2,), "device": torch.device("cpu")}  # type: ignore[attr-defined]
    found = through_disk(encoding.with_types({"model": state}, "part"))["model"]
    assert type(found) is collections.OrderedDict and first_difference(found, state) is None
    assert found._metadata == state._metadata  # type: ignore[attr-defined]
    assert type(found._metadata) is collections.OrderedDict
    state.note = object()  # type: ignore[attr-defined]
    with pytest.raises(NotSerialisable):
        encoding.encode(encoding.with_types(state, "part"))
    for of in ([1], [[1, 2], {}], [{"$": "dtype", "of": "float16"}, {"a": 1}], [{}, [1]]):
        with pytest.raises(ValueError):
            encoding.decode(msgspec.json.encode({"$": "attributes", "of": of}), {})


@pytest.mark.parametrize("items", [[1, 2.5, True, b"x"], [1, "text"], [[1], [2]]])
def test_a_list_that_goes_on_growing_stays_what_it_was(items: list[Any]) -> None:
    found = encoding.exact(items)
    before = copy.deepcopy(items)
    items.append(3)
    if isinstance(items[0], list):
        items[0].append(4)
    assert found == before
    with pytest.raises(NotSerialisable):
        encoding.exact([1, 2, object()])


def test_a_sparse_tensor_comes_back_as_it_was() -> None:
    """The parts of one that is not coalesced keep their order, in which they are added up."""
    indices, values = torch.tensor([[2, 0, 2]]), torch.randn(3, 4)
    for tensor in (torch.sparse_coo_tensor(indices, values, (5, 4)), torch.sparse_coo_tensor(size=(3,))):
        for each in (tensor, tensor.coalesce()):
            (found,) = through_disk([each])
            assert same_bits(found, each) and found.is_coalesced() == each.is_coalesced()
            assert not same_bits(found, each.to_dense())
    turned = torch.sparse_coo_tensor(indices.flip(1), values.flip(0), (5, 4))
    assert not same_bits(torch.sparse_coo_tensor(indices, values, (5, 4)), turned)
    document, tensors = encoding.encode([tensor.coalesce()])
    with pytest.raises(ValueError):
        encoding.decode(document.replace(b"[3]", b"[[3]]"), tensors)

"""Files of torch.save that hold more than data are read with stand-ins, and no code that they name is run."""

from __future__ import annotations

import decimal
import functools
import io
import pickle
import pickletools
import subprocess
import zipfile
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from resume_adapters.core.state import safe_load
from resume_adapters.core.state.stand_ins import Opaque, stand_in, stand_ins, standing_in


class Call:
    """Runs a program where it is unpickled freely."""

    def __init__(self, made: Path) -> None:
        self.made = str(made)

    def __reduce__(self) -> Any:
        return subprocess.check_call, (["touch", self.made],)


class Thing:
    """An object with state."""

    def __init__(self) -> None:
        self.size = 3

    def __setstate__(self, state: Any) -> None:
        raise AssertionError("code of the class ran")


class Settings(dict[str, Any]):
    """A dict of its own class."""

    def __setitem__(self, key: str, value: Any) -> None:
        raise AssertionError("code of the class ran")


class Names(list[Any]):
    """A list of its own class, with an attribute."""

    def extend(self, items: Any) -> None:
        raise AssertionError("code of the class ran")


class Weights(torch.Tensor):
    """A tensor of its own class."""


@pytest.fixture
def read(tmp_path: Path) -> Any:
    def save_and_read(content: Any) -> Any:
        torch.save(content, tmp_path / "file.pt")
        return load(tmp_path / "file.pt")

    return save_and_read


def load(file: Path) -> Any:
    with safe_load.data_only(safe_load.data_classes()), standing_in():
        return torch.load(file, map_location="cpu", mmap=True)


def names(content: Any) -> dict[str, str]:
    return stand_ins(content, lambda place: True)


def test_a_class_stands_in_for_one_that_is_not_loaded(read: Any, tmp_path: Path) -> None:
    thing, code, number = read([Thing(), Call(tmp_path / "executed"), decimal.Decimal("1.5")])
    assert (type(thing).__name__, thing.arguments, thing.state) == ("Thing", (), {"size": 3})
    assert (type(code).__name__, code.arguments) == ("check_call", (["touch", str(tmp_path / "executed")],))
    assert number.arguments == ("1.5",)
    assert not (tmp_path / "executed").exists()
    with pytest.raises(pickle.UnpicklingError, match="Thing"):
        torch.load(tmp_path / "file.pt", weights_only=True)  # outside of the context nothing has changed


def test_containers_of_their_own_class_are_read(read: Any) -> None:
    """Torch fills none of these, even where it was told of the class."""
    named = Names([1, decimal.Decimal(2)])
    named.title = "numbers"  # type: ignore[attr-defined]
    settings = Settings(a=torch.ones(2), b=named, c=deque([5], 3))
    content = read({"weights": torch.arange(3), "settings": settings})
    found = content["settings"]
    assert torch.equal(content["weights"], torch.arange(3))
    assert (type(found).__name__, list(found.entries)) == ("Settings", ["a", "b", "c"])
    assert torch.equal(found.entries["a"], torch.ones(2))
    names_read, last = found.entries["b"], found.entries["c"]
    assert names_read.items[0] == 1 and names_read.items[1].arguments == ("2",)
    assert names_read.state == {"title": "numbers"}
    assert last.arguments == ((), 3) and last.items == [5]
    assert set(names(content)) == {
        *(f"{Settings.__module__}.{each}" for each in ("Settings", "Names")),
        *("decimal.Decimal", "collections.deque"),
    }
    with torch.serialization.safe_globals([Settings, Names]):
        assert isinstance(read(settings), Opaque), "which torch could not fill, nor does it here"


def test_plain_data_are_as_torch_reads_them(tmp_path: Path) -> None:
    shared = torch.nn.Parameter(torch.rand(4))
    content = {
        "shared": [shared, shared],
        "mixed": ({1, 2}, b"bytes", 1.5, None, True, 2**70, "text", torch.float16, torch.Size([2]), bytearray(b"a")),
        "ordered": OrderedDict(a=Counter("aab")),
        "numbers": [np.float64(0.1), np.arange(6, dtype=">i2").reshape(2, 3), np.zeros((), np.complex64)],
        "path": Path("a/b"),
        "sparse": torch.eye(2).to_sparse(),
    }
    torch.save(content, tmp_path / "file.pt")
    found = load(tmp_path / "file.pt")
    with safe_load.data_only(safe_load.data_classes()):
        expected = torch.load(tmp_path / "file.pt")
    for each in (found, expected):
        assert each["shared"][0] is each["shared"][1]
        assert isinstance(each["shared"][0], torch.nn.Parameter)
    assert repr(found) == repr(expected)
    assert names(found) == {}


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        (np.array([1.5, "text", None], dtype=object), [1.5, "text", None]),
        (np.array([[1, Thing()]], dtype=object), None),
    ],
    ids=["of plain values", "of others"],
)
def test_arrays_of_objects_are_read(items: Any, expected: list[Any] | None, read: Any) -> None:
    found = read({"model": {"items": items}})
    array = found["model"]["items"]
    assert array.dtype == object and array.shape == items.shape
    if expected is not None:
        assert array.tolist() == expected and names(found) == {}
    else:
        assert names(found) == {f"{Thing.__module__}.Thing": "model.items.1"}


def test_arrays_and_numbers_of_other_kinds_become_stand_ins(read: Any) -> None:
    content = {"words": np.array(["one", "two"]), "word": np.str_("one"), "record": np.zeros(2, dtype="i4, f8")}
    found = read(content)
    assert isinstance(found["word"], Opaque)
    assert isinstance(found["words"][0], Opaque) and isinstance(found["record"][0], Opaque)
    assert set(names(found)) == {"numpy.ndarray", "numpy.dtype"}


def test_a_tensor_of_another_class_is_a_stand_in(read: Any) -> None:
    found = read({"weights": torch.ones(2).as_subclass(Weights)})
    assert list(names(found)) == [f"{Weights.__module__}.Weights"]


def test_what_is_made_by_an_object_is_a_stand_in(read: Any) -> None:
    class Keyed:
        def __reduce__(self) -> Any:
            return functools.partial(decimal.Decimal, 2), ()

    assert isinstance(read(Keyed()), Opaque)


def test_stand_ins_are_found_wherever_they_are(read: Any, tmp_path: Path) -> None:
    """A class that is not loaded is one, too."""
    things = np.array([1.5, Thing()], dtype=object)
    content = read({"model": {"things": things, "kind": decimal.Decimal}, "other": Call(tmp_path / "executed")})
    assert stand_ins(content, lambda place: place.startswith("model")) == {
        "decimal.Decimal": "model.kind",
        f"{Thing.__module__}.Thing": "model.things.1",
    }

    class Loaded:
        kind = stand_in("decimal.Decimal")

    assert stand_ins({"kind": Loaded}, lambda key: True) == {}, "what a class names is not in the file"


def test_only_what_is_named_has_a_stand_in(tmp_path: Path) -> None:
    """What a file that was looked at holds is no leave for another one."""
    files = [tmp_path / "known.pt", tmp_path / "other.pt", tmp_path / "text.pt"]
    for file, content in zip(files, ([Thing()], [decimal.Decimal(1)], [np.array(["a"])]), strict=True):
        torch.save(content, file)
    with safe_load.data_only(safe_load.data_classes()):
        with standing_in() as names:
            torch.load(files[0])
        assert names == {f"{Thing.__module__}.Thing"}
        with standing_in(names):
            assert isinstance(torch.load(files[0])[0], Opaque)
            for file, word in zip(files[1:], ("Decimal", r"numpy\.dtype"), strict=True):
                with pytest.raises(pickle.UnpicklingError, match=f"{word} is named"):
                    torch.load(file)


# ---- Files that nobody's torch.save wrote

OBJECT = (
    b"cnumpy\ndtype\n(X\x02\x00\x00\x00O8\x89\x88tR(K\x03X\x01\x00\x00\x00|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
)
"""A dtype of objects that claims to be one of numbers: numpy would take bytes of the file for addresses."""

HOSTILE = {
    "a call of what a call has made": b"\x80\x02ccollections\nOrderedDict\n)R)R.",
    "no call of a value": b"\x80\x02ctorch\nfloat32\n)R.",
    "a state for a class": b"\x80\x02ccollections\nOrderedDict\nN}X\x01\x00\x00\x00aK\x01s\x86b.",
    "a state for a function": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nN}X\x08\x00\x00\x00__code__K\x01s\x86b.",
    "a state for a number": b"\x80\x02K\x01K\x02b.",
    "items for a tuple": b"\x80\x02)K\x01a.",
    "items for a class": b"\x80\x02ccollections\nOrderedDict\n(K\x01K\x02u.",
    "an entry for a device": b"\x80\x02ctorch\ndevice\nX\x03\x00\x00\x00cpu\x85RK\x01K\x02s.",
    "an instruction that finds and calls": b"\x80\x02(ios\nmkdir\n.",
    "an instruction that calls": b"\x80\x02(cos\nmkdir\nX\x01\x00\x00\x00ao.",
    "a name in a registry": b"\x80\x02\x82\x01.",
    "a tensor of another storage": b"\x80\x02X\x01\x00\x00\x00aQ.",
    "keywords": b"\x80\x04ccollections\nOrderedDict\n)}\x92.",
}


REFUSED = [name for name in HOSTILE if name.startswith(("a call", "a state", "items", "an entry"))]
"""What is refused before it is tried; the others cannot be done."""


def write(file: Path, pickled: bytes) -> Path:
    torch.save({}, file)
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, pickled if name.endswith("data.pkl") else content)
    return file


@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_is_called_or_changed_that_torch_would_not(name: str, tmp_path: Path) -> None:
    pickletools.dis(HOSTILE[name], out=io.StringIO())  # the file must be a pickle
    file = write(tmp_path / "file.pt", HOSTILE[name])
    with pytest.raises(pickle.UnpicklingError if name in REFUSED else (KeyError, AssertionError, TypeError)):
        load(file)
    assert not hasattr(OrderedDict, "a") and torch._utils._rebuild_tensor_v2.__code__.co_name == "_rebuild_tensor_v2"


def test_bytes_of_a_file_are_no_addresses(tmp_path: Path) -> None:
    """With the dtype of the file, numpy would follow them."""
    module = np.zeros(1).__reduce__()[0].__module__.encode()
    array = b"c" + module + b"\n_reconstruct\n(cnumpy\nndarray\n(K\x00tC\x01btR(K\x01(K\x01t" + OBJECT
    pickled = b"\x80\x02" + array + b"\x89C\x08AAAAAAAAtb."
    found = load(write(tmp_path / "file.pt", pickled))
    (whole,) = found.tolist()
    assert isinstance(whole, Opaque) and whole.state[4] == b"A" * 8


def test_names_of_python_2_are_found(tmp_path: Path) -> None:
    assert load(write(tmp_path / "file.pt", b"\x80\x02c__builtin__\nset\n]K\x01a\x85R.")) == {1}
    absent = load(write(tmp_path / "file.pt", b"\x80\x02c__builtin__\nxrange\n."))
    assert (absent.__module__, absent.__name__) == ("builtins", "range") and issubclass(absent, Opaque)

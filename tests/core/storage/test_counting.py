"""A storage that calls a function before each operation that changes something."""

from __future__ import annotations

from pathlib import Path

from resume_adapters.core.storage.base import CHANGES, Storage, counting_storage
from resume_adapters.core.storage.local import LocalStorage


def test_every_operation_that_returns_nothing_changes_something_or_names_a_directory() -> None:
    """A new operation of a storage is counted, or this test asks about it."""
    operations = {name: each for name, each in vars(Storage).items() if callable(each) and not name.startswith("_")}
    silent = {name for name, each in operations.items() if each.__annotations__["return"] == "None"}
    assert silent - {"hold", "release"} <= CHANGES.keys() <= operations.keys()
    for name, index in CHANGES.items():
        assert list(operations[name].__annotations__)[index] in ("path", "target", "link")


def test_it_does_what_the_storage_beneath_does_and_says_before_what_it_changes(tmp_path: Path) -> None:
    changed: list[tuple[str, bool]] = []
    storage = counting_storage(LocalStorage(), lambda path: changed.append((path.name, path.exists())))
    directory, file, moved, link = (tmp_path / name for name in ("directory", "directory/file", "moved", "link"))
    storage.make_directory(directory)
    storage.write(file, b"one")
    storage.append(file, b" two")
    storage.sync(file)
    storage.replace(file, moved)
    assert storage.symlink("moved", link)
    assert changed == [
        ("directory", False),
        ("file", False),
        ("file", True),
        ("file", True),
        ("moved", False),
        ("link", False),
    ]
    del changed[:]
    local = LocalStorage()
    assert storage.read(moved) == b"one two" and storage.size(moved) == 7
    assert storage.digest(moved) == local.digest(moved)
    assert storage.entries(directory) == [] and storage.is_directory(directory)
    assert storage.stamp(moved) == local.stamp(moved) is not None and storage.free_bytes(directory) > 0
    assert storage.exists(link) and storage.is_file(link) and storage.is_link(link)
    assert storage.read_link(link) == "moved" and storage.real_path(link) == local.real_path(moved)
    assert changed == []
    storage.hold(directory)
    storage.replace(directory, tmp_path / "elsewhere")
    storage.write(directory / "held", b"three")
    storage.release(directory)
    storage.replace(tmp_path / "elsewhere", directory)
    assert local.read(directory / "held") == b"three"
    storage.remove_file(directory / "held")
    del changed[:]
    storage.remove_file(link)
    storage.remove_directory(directory)
    assert changed == [("link", True), ("directory", True)] and not directory.exists()

"""What differs between two checkpoints, part by part. Reads only, and no more of a tensor at a time than a piece."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from resume_adapters.core.checkpoint.contents import Contents, Digest, Located, Stored
from resume_adapters.core.checkpoint.native_parts import UNCOUNTED, Item, companion, order, parts_of_file
from resume_adapters.core.state.comparison import first_difference
from resume_adapters.core.state.tensor_difference import TensorDifference, measure

Kind = Literal["tensor", "form", "value", "generator", "content", "only_a", "only_b"]


@dataclass(frozen=True)
class Difference:
    """One thing that two checkpoints do not have alike.

    Attributes:
        where: the file, without its format; empty where a checkpoint is one file.
        name: of the value in the file, or of the generator; empty for a whole file.
        kind: ``"tensor"``: elements differ. ``"form"``: dtype or shape differs. ``"value"``: a number or text differs.
            ``"generator"``: the state of a random generator differs. ``"content"``: a file differs that is not read
            value by value. ``"only_a"`` and ``"only_b"``: one of the two lacks it.
        a: what the first has: a value, or a dtype and shape.
        b: what the second has.
        measured: how the elements of a tensor differ.
        values: the names of what differs in a generator's state, or the number of values in a file that one of the two
            lacks.
    """

    where: str
    name: str
    kind: Kind
    a: str = ""
    b: str = ""
    measured: TensorDifference | None = None
    values: tuple[str, ...] = ()


@dataclass
class PartComparison:
    """How two checkpoints compare in one part of the state.

    Attributes:
        name: the part.
        values: values that both have and that were compared.
        differences: what differs.
        same_files: files that are equal by their digests, and were not read.
    """

    name: str
    values: int = 0
    differences: list[Difference] = field(default_factory=list)
    same_files: list[str] = field(default_factory=list)

    @property
    def is_counted(self) -> bool:
        """Whether the part is state. Others hold when, where and with which settings a checkpoint was saved."""
        return self.name not in UNCOUNTED


@dataclass(frozen=True)
class Comparison:
    """How two checkpoints compare.

    Attributes:
        parts: every part, by name, in an order for people.
        by_digest: files that were compared as a whole, and why.
    """

    parts: dict[str, PartComparison]
    by_digest: dict[str, str]

    @property
    def is_equal(self) -> bool:
        """Whether no part of the state differs."""
        return not any(part.differences for part in self.parts.values() if part.is_counted)


def compare(a: Contents, b: Contents) -> Comparison:
    """Compare two checkpoints.

    Files for which both manifests have the same digest are not read. Values are matched by what they are, so the number
    of files of a model, and their format, do not matter.
    """
    same = _same_files(a, b)
    index_a, index_b = a.index(same), b.index(same)
    parts: dict[str, PartComparison] = {}
    for file in sorted(same):
        for name in parts_of_file(file):
            parts.setdefault(name, PartComparison(name)).same_files.append(file)
    for item in [each for each in index_a if each in index_b]:
        parts.setdefault(item.part, PartComparison(item.part)).values += 1
    found = [*_changed(a, index_a, b, index_b), *_missing("only_a", index_a, index_b)]
    for item, difference in _by_generator([*found, *_missing("only_b", index_b, index_a)]):
        parts.setdefault(item.part, PartComparison(item.part)).differences.append(difference)
    whole = [each for each in (*index_a.values(), *index_b.values()) if isinstance(each.value, Digest)]
    ordered = {name: parts[name] for name in sorted(parts, key=order)}
    return Comparison(ordered, {each.file: each.value.reason for each in whole})


def _same_files(a: Contents, b: Contents) -> frozenset[str]:
    """Return the files that both have with the same digest; a part of this package is one or two files."""
    digests = {file: (a.known_digest(file), b.known_digest(file)) for file in a.files.keys() & b.files.keys()}
    same = {file for file, (one, other) in digests.items() if one is not None and one == other}
    halves = {
        file for file in same if companion(file) in a.files.keys() | b.files.keys() and companion(file) not in same
    }
    return frozenset(same - halves)


Found = tuple[Item, Difference]


def _changed(a: Contents, index_a: dict[Item, Located], b: Contents, index_b: dict[Item, Located]) -> Iterator[Found]:
    """Yield what both have and is not equal."""
    for item, one in index_a.items():
        if item not in index_b:
            continue
        other = index_b[item]
        if isinstance(one.value, Stored) and isinstance(other.value, Stored):
            forms = a.form(one), b.form(other)
            if forms[0] != forms[1]:
                yield item, Difference(item.where, item.name, "form", *forms)
            elif measured := measure(zip(a.pieces(one), b.pieces(other), strict=True)):
                yield item, Difference(item.where, item.name, "tensor", *forms, measured)
        elif isinstance(one.value, Digest) and isinstance(other.value, Digest):
            if one.value.digest != other.value.digest:
                yield item, Difference(item.where, item.name, "content", one.value.digest, other.value.digest)
        elif first_difference(one.value, other.value) is not None:
            yield item, Difference(item.where, item.name, "value", _text(a, one), _text(b, other))


def _missing(
    kind: Literal["only_a", "only_b"], index: dict[Item, Located], others: dict[Item, Located]
) -> Iterator[Found]:
    """Yield what one has and the other lacks; a file of which the other has nothing is one difference."""
    per_file: dict[str, list[Item]] = {}
    for item, located in index.items():
        per_file.setdefault(located.file, []).append(item)
    for file, items in per_file.items():
        absent = [item for item in items if item not in others]
        if len(absent) == len(items):
            part = parts_of_file(file)[0]
            yield Item(part, file, ""), Difference(file, "", kind, values=(str(len(items)),))
        else:
            yield from ((item, Difference(item.where, item.name, kind)) for item in absent)


def _by_generator(found: list[Found]) -> Iterator[Found]:
    """Join what differs in the state of one random generator."""
    joined: dict[tuple[str, str], list[Found]] = {}
    for item, difference in found:
        if item.generator:
            joined.setdefault((item.where, item.generator), []).append((item, difference))
        else:
            yield item, difference
    for (where, generator), group in joined.items():
        names = tuple(difference.name for _, difference in group)
        yield group[0][0], Difference(where, generator, "generator", values=names)


_LONGEST = 60
"""Characters of a value that are shown."""


def _text(contents: Contents, located: Located) -> str:
    """Return a value as text that is not long."""
    if isinstance(located.value, Stored):
        return f"a tensor {contents.form(located)}"
    text = repr(located.value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."

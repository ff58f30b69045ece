"""Check footers before pyarrow accesses the metadata of column chunks.

pyarrow parses the metadata of a column chunk on access. For a chunk that is encrypted or contradicts the schema, its
C++ exception passes through code that does not catch it, and the process aborts. So every footer is checked here first.

The check takes about 10 µs per chunk. The files of a dataset mostly come from one writer, and their footers differ only
in numbers and bounds. A footer that passes is therefore compiled to a regular expression, which checks the footers of
other files at native speed: it matches the bytes of a row group with the same fields, types and lengths, whatever their
values. One thread compiles at a time; the others go on without it.
"""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING, NamedTuple

from strata.data.formats.parquet import thrift
from strata.data.formats.parquet.thrift import Scanner, ThriftDamaged

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

MAX_LEARNED_LEAVES = 64
"""The maximum number of leaves of a file that is compiled to a regular expression, at about 0.2 ms per leaf."""
MAX_LEARNED = 16
MAX_REMEMBERED = 4096
"""Footers that have passed, by file version."""
_WIDTHS = {0: 1, 1: 4, 2: 8, 3: 12, 4: 4, 5: 8}
"""Bytes of a value in statistics, by physical type: boolean, int32, int64, int96, float, double."""
_TEXT, _FIXED = 6, 7
_BOUNDS = (1, 2, 5, 6)
"""Fields of statistics: maximum and minimum, in their deprecated and their current form."""
_NUMBER = rb"[\x80-\xff]*+[\x00-\x7f]"
_BINARY = b"(?:" + b"|".join(re.escape(bytes([size])) + b".{%d}" % size for size in range(128)) + b")"
"""Fewer than 128 bytes; a row group with a longer value takes the slower check."""


class FooterDamaged(ValueError):
    """The footer contradicts itself."""


class Leaf(NamedTuple):
    """A column of the schema that has no children."""

    kind: int
    """The physical type."""
    width: int | None
    """Bytes of a value; None if they vary."""
    max_definition: int
    max_repetition: int


class _Form(NamedTuple):
    """The common form of the footers of one writer."""

    head: bytes
    """Version and schema."""
    group: re.Pattern[bytes]


_forms: tuple[_Form, ...] = ()
"""The forms that were learned last, by any thread."""
_learning = threading.Lock()
"""Never waited for: in a forked child it may stay locked forever."""
_remembered: dict[str, frozenset[int]] = {}


def hidden_leaves(footer: bytes, version: str) -> frozenset[int]:
    """Return the leaves whose chunks are encrypted in some row group. pyarrow can access all other chunks.

    Raises:
        FooterDamaged: pyarrow must not access any chunk.
    """
    found = _remembered.get(version)
    if found is None:
        try:
            found = frozenset() if _is_known(footer) else _check(footer)
        except ThriftDamaged as error:
            raise FooterDamaged(str(error)) from error
        if len(_remembered) >= MAX_REMEMBERED:
            _remembered.clear()
        _remembered[version] = found
    return found


def _is_known(footer: bytes) -> bool:
    """Return whether all row groups have a form that has passed before."""
    for form in _forms:
        if not footer.startswith(form.head):
            continue
        scan = Scanner(footer, len(form.head))
        for _ in range(_num_groups(scan)):
            matched = form.group.match(footer, scan.at)
            if matched is None:
                break
            scan.at = matched.end()
        else:
            return True
    return False


def _num_groups(scan: Scanner) -> int:
    """Move from the end of the schema to the first row group, in the field order of every known writer.

    Raises:
        ThriftDamaged: The fields have another order.
    """
    if scan.byte() != 0x10 | thrift.I64:
        raise ThriftDamaged("the number of rows does not follow the schema")
    scan.integer()
    if scan.byte() != 0x10 | thrift.LIST:
        raise ThriftDamaged("row groups do not follow the number of rows")
    return scan.items(thrift.STRUCT)


def _check(footer: bytes) -> frozenset[int]:
    """Check a footer field by field, and return its encrypted leaves."""
    scan = Scanner(footer)
    leaves: list[Leaf] = []
    hidden: set[int] = set()
    head_end = 0
    groups: list[tuple[int, int]] = []

    def schema() -> None:
        nonlocal head_end
        leaves.extend(_leaves(scan.raws()))
        head_end = scan.at

    def row_groups() -> None:
        for _ in range(scan.items(thrift.STRUCT)):
            start = scan.at
            hidden.update(_hidden_in_group(scan, leaves))
            groups.append((start, scan.at))

    found = scan.struct({2: (thrift.LIST, schema), 4: (thrift.LIST, row_groups)})
    if 2 not in found or 4 not in found:
        raise FooterDamaged("it has no schema or no list of row groups")
    if groups and not hidden and len(leaves) <= MAX_LEARNED_LEAVES:
        start, end = groups[0]
        _learn(footer, footer[:head_end], footer[start:end], leaves)
    return frozenset(hidden)


def _learn(footer: bytes, head: bytes, group: bytes, leaves: Sequence[Leaf]) -> None:
    """Compile the form of these row groups, unless another thread is compiling, or has compiled it."""
    global _forms  # noqa: PLW0603 - always replaced as a whole
    if _learning.acquire(blocking=False):
        try:
            if not _is_known(footer):
                _forms = (_Form(head, _pattern(group, leaves)), *_forms[: MAX_LEARNED - 1])
        finally:
            _learning.release()


def _hidden_in_group(scan: Scanner, leaves: Sequence[Leaf]) -> list[int]:
    hidden: list[int] = []

    def chunks() -> None:
        number = scan.items(thrift.STRUCT)
        if number != len(leaves):
            raise FooterDamaged(f"a row group has {number} columns, the schema {len(leaves)}")
        hidden.extend(index for index, leaf in enumerate(leaves) if _is_hidden(scan, leaf))

    if 1 not in scan.struct({1: (thrift.LIST, chunks)}):
        raise FooterDamaged("a row group has no columns")
    return hidden


def _is_hidden(scan: Scanner, leaf: Leaf) -> bool:
    """Scan one column chunk, and return whether it is encrypted."""
    found = scan.struct(
        {
            3: (thrift.STRUCT, lambda: _check_metadata(scan, leaf)),
            8: (thrift.STRUCT, scan.raw),
            9: (thrift.BINARY, scan.binary),
        }
    )
    is_hidden = 8 in found or 9 in found
    if 3 not in found and not is_hidden:
        raise FooterDamaged("a column chunk has no metadata")
    return is_hidden


def _check_metadata(scan: Scanner, leaf: Leaf) -> None:
    def kind() -> None:
        if (stated := scan.integer()) != leaf.kind:
            raise FooterDamaged(f"a column chunk has the physical type {stated}, the schema {leaf.kind}")

    def bound() -> None:
        size = len(scan.binary())
        if leaf.width is not None and size < leaf.width:
            raise FooterDamaged(f"a bound has {size} bytes, the values of its column {leaf.width}")

    def histogram(max_level: int) -> None:
        if (size := len(scan.integers())) not in (0, max_level + 1):
            raise FooterDamaged(f"a histogram counts {size} levels, the column has {max_level + 1}")

    def unencoded() -> None:
        if leaf.kind != _TEXT:
            raise FooterDamaged("a column without strings states the bytes of its strings")
        scan.integer()

    sizes = {
        1: (thrift.I64, unencoded),
        2: (thrift.LIST, lambda: histogram(leaf.max_repetition)),
        3: (thrift.LIST, lambda: histogram(leaf.max_definition)),
    }
    statistics = dict.fromkeys(_BOUNDS, (thrift.BINARY, bound))
    found = scan.struct(
        {
            1: (thrift.I32, kind),
            12: (thrift.STRUCT, lambda: scan.struct(statistics)),
            16: (thrift.STRUCT, lambda: scan.struct(sizes)),
        }
    )
    if 1 not in found:
        raise FooterDamaged("a column chunk has no type")


def _leaves(elements: Sequence[bytes]) -> list[Leaf]:
    """Return the leaves of a schema, whose elements are stored depth first, beginning with the root."""
    leaves: list[Leaf] = []
    above: list[list[int]] = []
    """The number of remaining children, and the levels, of each ancestor."""
    for number, data in enumerate(elements):
        scan = Scanner(data)
        element = scan.struct(dict.fromkeys((1, 2, 3, 5), (thrift.I32, scan.integer)))
        repetition = element.get(3, 0) if number else 0
        if repetition not in (0, 1, 2):
            raise FooterDamaged(f"a column has the repetition {repetition}")
        definition_level, repetition_level = above[-1][1:] if above else (0, 0)
        definition_level += repetition != 0
        repetition_level += repetition == 2
        if above:
            above[-1][0] -= 1
        if element.get(5, 0) > 0:
            above.append([element[5], definition_level, repetition_level])
        elif number:
            kind = element.get(1, -1)
            width = None if kind == _TEXT else element.get(2, 0) if kind == _FIXED else _WIDTHS.get(kind, 0)
            leaves.append(Leaf(kind, width, definition_level, repetition_level))
        while above and above[-1][0] == 0:
            above.pop()
    return leaves


# --- the form of a valid row group, as a regular expression ---


def _pattern(group: bytes, leaves: Sequence[Leaf]) -> re.Pattern[bytes]:
    """Return the pattern of a valid row group: one that differs only in numbers and bounds is valid as well."""
    return re.compile(_PatternWriter(group, leaves).write(), re.DOTALL)


class _PatternWriter:
    """Writes the regular expression of a row group while scanning it."""

    def __init__(self, group: bytes, leaves: Sequence[Leaf]) -> None:
        self._group = group
        self._scan = Scanner(group)
        self._leaves = iter(leaves)

    def write(self) -> bytes:
        return self._struct({1: lambda: self._items(self._chunk)})

    def _chunk(self, _: int) -> bytes:
        leaf = next(self._leaves)
        statistics = dict.fromkeys(_BOUNDS, lambda: self._bound(leaf))
        metadata = {
            1: lambda: self._exactly(thrift.I32),
            3: lambda: self._exactly(thrift.LIST),  # the column's path
            12: lambda: self._struct(statistics),
        }
        return self._struct({3: lambda: self._struct(metadata)})

    def _struct(self, known: Mapping[int, Callable[[], bytes]]) -> bytes:
        made: list[bytes] = []
        number = 0
        while True:
            start = self._scan.at
            head = self._scan.byte()
            if not head:
                return b"".join([*made, b"\\x00"])
            kind = head & 0x0F
            number = number + (head >> 4) if head >> 4 else self._scan.integer()
            if kind in (thrift.TRUE, thrift.FALSE):  # the type of a boolean is its value
                either = (re.escape(bytes([head & 0xF0 | each])) for each in (thrift.TRUE, thrift.FALSE))
                made.append(b"(?:%b)" % b"|".join(either))
                continue
            made.append(self._since(start))
            made.append(known[number]() if number in known else self._value(kind))

    def _value(self, kind: int) -> bytes:
        start = self._scan.at
        if kind in (thrift.I16, thrift.I32, thrift.I64):
            self._scan.varint()
            return _NUMBER
        if kind == thrift.BINARY:
            self._scan.binary()
            return _BINARY
        if kind == thrift.STRUCT:
            return self._struct({})
        if kind == thrift.LIST:
            return self._items(self._value)
        self._scan.skip(kind)
        return self._since(start)

    def _items(self, item: Callable[[int], bytes]) -> bytes:
        start = self._scan.at
        kind, number = self._scan.list_head()
        return b"".join([self._since(start), *(item(kind) for _ in range(number))])

    def _bound(self, leaf: Leaf) -> bytes:
        size = len(self._scan.binary())
        return _BINARY if leaf.width is None or size > 0x7F else re.escape(bytes([size])) + b".{%d}" % size

    def _exactly(self, kind: int) -> bytes:
        start = self._scan.at
        self._scan.skip(kind)
        return self._since(start)

    def _since(self, start: int) -> bytes:
        return re.escape(self._group[start : self._scan.at])

"""Footers of many Parquet files as one, so that the decoder is asked once for all of them.

A footer is a Thrift struct: version, schema, number of rows, row groups, notes (Arrow's own schema among them), and who
wrote it. Files of a dataset were mostly written by one program with one schema, and then all of it is the same, byte
for byte, but for the number of rows and the row groups; yet parsing the same parts is most of the work that opening
such a file takes. So they are recognised, and what differs is strung together: one footer with the row groups of many
files.

Only the places where parts begin and end are looked at here. What is in them is left to the decoder, which also says if
it makes no sense.
"""

from __future__ import annotations

from dataclasses import dataclass

from strata.data.formats.parquet.thrift import I32, I64, LIST, STRUCT, Scanner, ThriftDamaged, integer, varint

_NEXT = 0x10
"""In the byte before a field: it is the one after the field before."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What the footers of files with the same schema, by the same writer, have in common."""

    head: bytes
    """Version and schema."""
    tail: bytes
    """All that follows the row groups."""


@dataclass(frozen=True, slots=True)
class RowGroups:
    """What a footer has of its own."""

    num_rows: int
    """That the file claims to have."""
    num_groups: int
    data: bytes


def layout_of(footer: bytes) -> Layout | None:
    """None: its parts are not in the order in which every known writer puts them, or it makes no sense."""
    scanner = Scanner(footer)
    try:
        _expect(scanner, I32)
        scanner.varint()
        _expect(scanner, LIST)
        _pass_structs(scanner, scanner.items(STRUCT))
        head = footer[: scanner.at]
        _, num_groups = _own_numbers(scanner)
        _pass_structs(scanner, num_groups)
    except ThriftDamaged:
        return None
    return Layout(head, footer[scanner.at :])


def row_groups_of(footer: bytes, layout: Layout) -> RowGroups | None:
    """None: it is laid out otherwise."""
    if not footer.startswith(layout.head) or not footer.endswith(layout.tail):
        return None
    scanner = Scanner(footer, len(layout.head))
    try:
        num_rows, num_groups = _own_numbers(scanner)
    except ThriftDamaged:
        return None
    end = len(footer) - len(layout.tail)
    return RowGroups(num_rows, num_groups, footer[scanner.at : end]) if scanner.at <= end else None


def joined(layout: Layout, parts: list[RowGroups]) -> bytes:
    """A footer with the row groups of all."""
    own = b"".join(
        [
            bytes([_NEXT | I64]),
            integer(sum(part.num_rows for part in parts)),
            bytes([_NEXT | LIST, 0xF0 | STRUCT]),
            varint(sum(part.num_groups for part in parts)),
        ]
    )
    return b"".join([layout.head, own, *(part.data for part in parts), layout.tail])


def _own_numbers(scanner: Scanner) -> tuple[int, int]:
    """Of rows and of row groups, which then begin."""
    _expect(scanner, I64)
    num_rows = scanner.integer()
    _expect(scanner, LIST)
    return num_rows, scanner.items(STRUCT)


def _expect(scanner: Scanner, kind: int) -> None:
    if scanner.byte() != _NEXT | kind:
        raise ThriftDamaged("another field than the next, or of another type")


def _pass_structs(scanner: Scanner, number: int) -> None:
    for _ in range(number):
        scanner.raw()

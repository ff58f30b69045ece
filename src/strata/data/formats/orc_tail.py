"""Parse the tail of an ORC file: the offsets, row counts and statistics of its stripes.

pyarrow reads stripes but reports neither their rows nor their offsets. The tail is, from the end of the file: one byte
with the length of the postscript, the postscript, the footer, and the metadata (statistics of every stripe). These are
protocol buffers, from which `fields` picks the few needed fields; numbers and meanings follow the ORC v1 specification.
Footer and metadata are compressed in chunks with headers of three bytes.

LZO is decompressed here because pyarrow offers no function for it, and python-lzo binds a C library that few machines
have. Only footers of a few hundred KiB are affected.

The input is untrusted: every length is checked against the available bytes, and every size is limited.
"""

from __future__ import annotations

import functools
import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import xxhash
import zstandard

if TYPE_CHECKING:
    from collections.abc import Iterator

MAGIC: Final = b"ORC"
POSTSCRIPT_BYTES_MAX: Final = 255
SECTION_BYTES_MAX: Final = 512 << 20
"""The limit for the footer, the metadata or a stripe's footer, decompressed."""
CODECS: Final = ("none", "zlib", "snappy", "lzo", "lz4", "zstd", "brotli")
_BLOCK_BYTES_DEFAULT: Final = 256 << 10
_BLOCK_BYTES_MAX: Final = 1 << 23
"""A chunk's header has 23 bits for its length."""
_VARINT_BYTES_MAX: Final = 10
_WRITER_WITH_SOUND_STATISTICS: Final = 1
_WRITER_WITH_UTC_STATISTICS: Final = 6
_SECOND_NS: Final = 1_000_000_000
_INDEX_STREAMS: Final = frozenset({6, 7, 8})
"""Row indexes and Bloom filters, which decoding a stripe does not need."""
_LZO_END: Final = 16384
"""The distance in the instruction that ends a block."""

BOOLEAN, FLOAT, DOUBLE, STRING, TIMESTAMP, DATE = 0, 5, 6, 7, 9, 15
INTEGERS: Final = frozenset({1, 2, 3, 4})
FLOATS: Final = frozenset({FLOAT, DOUBLE})


class TailDamaged(ValueError):
    """The bytes contradict the specification."""


class LzoDamaged(ValueError):
    """The bytes are not LZO, or exceed the limit when decompressed."""


class TailUnsupported(TailDamaged):
    """The bytes may be valid but use an unsupported feature."""


@dataclass(frozen=True, slots=True)
class Postscript:
    footer_bytes: int
    metadata_bytes: int
    codec: str
    block_bytes: int
    writer_version: int
    num_bytes: int
    """The size of the postscript, including the byte with its length."""

    @property
    def tail_bytes(self) -> int:
        """The bytes from the start of the metadata to the end of the file."""
        return self.metadata_bytes + self.footer_bytes + self.num_bytes


@dataclass(frozen=True, slots=True)
class Stripe:
    offset: int
    index_bytes: int
    data_bytes: int
    footer_bytes: int
    num_rows: int

    @property
    def num_bytes(self) -> int:
        return self.index_bytes + self.data_bytes + self.footer_bytes

    @property
    def footer_offset(self) -> int:
        return self.offset + self.index_bytes + self.data_bytes


@dataclass(frozen=True, slots=True)
class Stream:
    """A part of a stripe."""

    column: int
    offset: int
    num_bytes: int
    is_index: bool


@dataclass(frozen=True, slots=True)
class Statistics:
    """The statistics of one column, in a stripe or in the file."""

    num_values: int
    """The number of values without nulls."""
    has_null: bool
    """True also if the file does not state it."""
    low: bool | int | float | str | None = None
    """No value is below; None if unknown. Times are nanoseconds, dates are days since 1970."""
    high: bool | int | float | str | None = None


@dataclass(frozen=True, slots=True)
class OrcTail:
    postscript: Postscript
    num_rows: int
    stripes: tuple[Stripe, ...]
    column_ids: dict[str, range]
    """The number of each top-level column, followed by those of the columns nested in it."""
    kinds: tuple[int, ...]
    """The types of all columns, by number."""
    version: str
    _file_statistics: tuple[memoryview, ...]
    _metadata: memoryview

    def file_statistics(self, column: int) -> Statistics | None:
        if column >= len(self._file_statistics) or not self._has_sound_statistics:
            return None
        return self._statistics(self._file_statistics[column], column)

    def stripe_statistics(self, columns: list[int]) -> list[dict[int, Statistics]]:
        """Return for every stripe the statistics of those columns that have any.

        Raises:
            TailDamaged: The statistics cannot be parsed.
        """
        nothing: list[dict[int, Statistics]] = [{} for _ in self.stripes]
        if not self._has_sound_statistics:
            return nothing
        data = decompressed(self._metadata, self.postscript)
        stripes = [view for number, view in fields(data) if number == 1 and isinstance(view, memoryview)]
        if len(stripes) != len(self.stripes):
            return nothing
        found = []
        for stripe in stripes:
            parts = [view for number, view in fields(stripe) if number == 1 and isinstance(view, memoryview)]
            found.append({column: self._statistics(parts[column], column) for column in columns if column < len(parts)})
        return found

    @property
    def _has_sound_statistics(self) -> bool:
        """Whether the writer is recent enough: the first writers stated wrong maxima of strings and stripes."""
        return self.postscript.writer_version >= _WRITER_WITH_SOUND_STATISTICS

    def _statistics(self, data: memoryview, column: int) -> Statistics:
        kind = self.kinds[column] if column < len(self.kinds) else -1
        has_utc = self.postscript.writer_version >= _WRITER_WITH_UTC_STATISTICS
        return parse_statistics(data, kind, has_utc=has_utc)


# -- protocol buffers --------------------------------------------------------------------------------------------------


def fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield the number and value of each field of a message; values other than varints are bytes.

    Raises:
        TailDamaged: The data is not a message.
    """
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, position = _varint(data, position)
            yield number, value
            continue
        if wire == 2:
            size, position = _varint(data, position)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise TailDamaged(f"field {number} has the unknown wire type {wire}")
        if number == 0 or size > len(data) - position:
            raise TailDamaged(f"field {number} has {size} bytes, but {len(data) - position} are left")
        yield number, data[position : position + size]
        position += size


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    """Return the number at a position, and the position after it."""
    if position < len(data) and data[position] < 0x80:  # most are small
        return data[position], position + 1
    value = 0
    for shift, byte in enumerate(data[position : position + _VARINT_BYTES_MAX]):
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return value, position + shift + 1
    raise TailDamaged("a number does not end")


def _message(data: memoryview) -> dict[int, int | memoryview]:
    """Return fields that occur once; the last one wins."""
    return dict(fields(data))


def _int(message: dict[int, int | memoryview], number: int, default: int = 0) -> int:
    value = message.get(number, default)
    if not isinstance(value, int):
        raise TailDamaged(f"field {number} is not a number")
    return value


def _bytes(message: dict[int, int | memoryview], number: int) -> memoryview:
    value = message.get(number, memoryview(b""))
    if isinstance(value, int):
        raise TailDamaged(f"field {number} is a number")
    return value


def _zigzag(message: dict[int, int | memoryview], number: int) -> int | None:
    if number not in message:
        return None
    value = _int(message, number)
    return (value >> 1) ^ -(value & 1)


def _packed(value: int | memoryview) -> Iterator[int]:
    """Yield repeated numbers, one or many per field."""
    if isinstance(value, int):
        yield value
        return
    position = 0
    while position < len(value):
        number, position = _varint(value, position)
        yield number


# -- compression -------------------------------------------------------------------------------------------------------


def decompressed(section: memoryview, postscript: Postscript) -> memoryview:
    """Return a footer or the metadata, decompressed.

    Raises:
        TailDamaged: It cannot be decompressed, or exceeds the limit.
    """
    if postscript.codec == "none":
        return section
    result = bytearray()
    position = 0
    while position < len(section):
        header = int.from_bytes(section[position : position + 3], "little")
        size, is_original = header >> 1, header & 1
        chunk = section[position + 3 : position + 3 + size]
        if position + 3 + size > len(section):
            raise TailDamaged(f"a chunk has {size} bytes, but {len(section) - position - 3} are left")
        result += chunk if is_original else _inflate(chunk, postscript)
        position += 3 + size
        if len(result) > SECTION_BYTES_MAX:
            raise TailDamaged(f"more than {SECTION_BYTES_MAX} bytes when decompressed")
    return memoryview(result)


def _inflate(chunk: memoryview, postscript: Postscript) -> bytes:
    limit = postscript.block_bytes
    try:
        match postscript.codec:
            case "zlib":
                return zlib.decompressobj(-zlib.MAX_WBITS).decompress(chunk, limit)
            case "zstd":
                return zstandard.ZstdDecompressor(max_window_size=_BLOCK_BYTES_MAX).stream_reader(chunk).read(limit)
            case "lzo":
                return lzo_decompress(chunk, limit)
            case "snappy":
                size, codec = _varint(chunk, 0)[0], "snappy"
            case "lz4":
                size, codec = _lz4_size(chunk), "lz4_raw"
            case other:
                raise TailUnsupported(f"its compression, {other}, is not supported")
        if size > limit:
            raise TailDamaged(f"a chunk has {size} bytes, but {limit} are allowed")
        inflated: bytes = pa.Codec(codec).decompress(chunk, decompressed_size=size, asbytes=True)
    except (zlib.error, zstandard.ZstdError, LzoDamaged, OSError, pa.ArrowException) as error:
        raise TailDamaged(f"a chunk is not {postscript.codec}: {error}") from error
    return inflated


def _lz4_size(chunk: memoryview) -> int:
    """Return the decompressed size of a block, which does not state it, by adding up its literals and copies."""
    total = position = 0

    def length(nibble: int) -> int:
        nonlocal position
        size = nibble
        while nibble == 15 and position < len(chunk):
            position += 1
            size += chunk[position - 1]
            if chunk[position - 1] < 255:
                break
        return size

    while position < len(chunk):
        token = chunk[position]
        position += 1
        literals = length(token >> 4)
        position += literals
        total += literals
        if position >= len(chunk):
            break
        position += 2
        total += length(token & 15) + 4
    return total


# -- the parts of the tail ---------------------------------------------------------------------------------------------


def parse_postscript(end: memoryview, file_bytes: int) -> Postscript:
    """Parse the postscript. `end` holds the last 256 bytes of a file of `file_bytes`, or all of them.

    Raises:
        TailDamaged: This is not the end of an ORC file.
    """
    size = end[-1] if len(end) else 0
    if size == 0 or size + 1 > len(end):
        raise TailDamaged("its last byte is not the length of a postscript")
    message = _message(end[-1 - size : -1])
    if bytes(_bytes(message, 8000)) != MAGIC:
        raise TailDamaged("it does not end with a postscript")
    codec = _int(message, 2)
    block_bytes = _int(message, 3, _BLOCK_BYTES_DEFAULT)
    if codec >= len(CODECS) or block_bytes > _BLOCK_BYTES_MAX:
        raise TailDamaged(f"the postscript states compression {codec} in blocks of {block_bytes} bytes")
    footer_bytes, metadata_bytes = _int(message, 1), _int(message, 5)
    if max(footer_bytes, metadata_bytes) > SECTION_BYTES_MAX:
        raise TailDamaged(f"a footer of {footer_bytes} or metadata of {metadata_bytes} bytes exceeds the limit")
    if footer_bytes + metadata_bytes + size + 1 + len(MAGIC) > file_bytes:
        raise TailDamaged(f"footer and metadata have {footer_bytes + metadata_bytes} bytes, the file {file_bytes}")
    return Postscript(footer_bytes, metadata_bytes, CODECS[codec], block_bytes, _int(message, 6), size + 1)


def parse_tail(data: memoryview, postscript: Postscript, file_bytes: int) -> OrcTail:
    """Parse the tail. `data` holds the last `postscript.tail_bytes` of a file of `file_bytes`.

    Raises:
        TailDamaged: The tail contradicts the specification.
    """
    assert len(data) == postscript.tail_bytes
    metadata, footer = data[: postscript.metadata_bytes], data[postscript.metadata_bytes : -postscript.num_bytes]
    stripes: list[Stripe] = []
    types: list[memoryview] = []
    statistics: list[memoryview] = []
    num_rows = 0
    for number, value in fields(decompressed(footer, postscript)):
        if number == 6 and isinstance(value, int):
            num_rows = value
        elif number == 10:
            raise TailUnsupported("its encryption is not supported")
        elif number in (3, 4, 7) and isinstance(value, memoryview):
            if number == 3:
                stripes.append(_parse_stripe(value, file_bytes - len(data)))
            else:
                (types if number == 4 else statistics).append(value)
    if sum(stripe.num_rows for stripe in stripes) != num_rows:
        raise TailDamaged(f"its stripes have {sum(stripe.num_rows for stripe in stripes)} rows, not {num_rows}")
    return OrcTail(
        postscript=postscript,
        num_rows=num_rows,
        stripes=tuple(stripes),
        column_ids=_column_ids(types),
        kinds=tuple(_int(_message(each), 1) for each in types),
        version=xxhash.xxh3_128_hexdigest(data),
        _file_statistics=tuple(statistics),
        _metadata=metadata,
    )


def _parse_stripe(data: memoryview, end: int) -> Stripe:
    message = _message(data)
    stripe = Stripe(*(_int(message, number) for number in (1, 2, 3, 4, 5)))
    if stripe.offset + stripe.num_bytes > end:
        raise TailDamaged(f"a stripe ends at byte {stripe.offset + stripe.num_bytes}, but the tail begins at {end}")
    return stripe


def _column_ids(types: list[memoryview]) -> dict[str, range]:
    """Return the numbers of each column. Columns are numbered depth first, each before its children."""
    if not types:
        raise TailDamaged("it has no columns")
    children: list[int] = []
    names: list[str] = []
    for number, value in fields(types[0]):
        if number == 2:
            children.extend(_packed(value))
        elif number == 3 and isinstance(value, memoryview):
            names.append(_text(value))
    bounds = [*children, len(types)]
    if len(names) != len(children) or bounds != sorted(bounds) or bounds[0] < 1:
        raise TailDamaged(f"it has {len(names)} names for the columns {children[:8]} of {len(types)}")
    return {name: range(bounds[index], bounds[index + 1]) for index, name in enumerate(names)}


def parse_stripe_footer(section: memoryview, postscript: Postscript, stripe: Stripe) -> list[Stream]:
    """Return the streams of a stripe, in file order.

    Raises:
        TailDamaged: The footer contradicts the specification.
    """
    streams = []
    offset = stripe.offset
    for number, value in fields(decompressed(section, postscript)):
        if number == 1 and isinstance(value, memoryview):
            message = _message(value)
            num_bytes = _int(message, 3)
            streams.append(Stream(_int(message, 2), offset, num_bytes, _int(message, 1) in _INDEX_STREAMS))
            offset += num_bytes
    if offset > stripe.footer_offset:
        raise TailDamaged(f"its streams end at byte {offset}, but its footer begins at {stripe.footer_offset}")
    return streams


# -- statistics --------------------------------------------------------------------------------------------------------


def parse_statistics(data: memoryview, kind: int, *, has_utc: bool) -> Statistics:
    """Parse the statistics of a column of type `kind`; types without a constant above have no bounds."""
    message = _message(data)
    make = functools.partial(Statistics, num_values=_int(message, 1), has_null=bool(_int(message, 10, 1)))
    low: bool | int | float | str | None = None
    high: bool | int | float | str | None = None
    if kind in INTEGERS:
        bounds = _message(_bytes(message, 2))
        low, high = _zigzag(bounds, 1), _zigzag(bounds, 2)
    elif kind in FLOATS:
        low, high = _float_bounds(_message(_bytes(message, 3)))
    elif kind == STRING:
        bounds = _message(_bytes(message, 4))
        low = _text(_bytes(bounds, 1 if 1 in bounds else 4)) if {1, 4} & bounds.keys() else None
        high = _text(_bytes(bounds, 2 if 2 in bounds else 5)) if {2, 5} & bounds.keys() else None
    elif kind == DATE:
        bounds = _message(_bytes(message, 7))
        low, high = _zigzag(bounds, 1), _zigzag(bounds, 2)
    elif kind == TIMESTAMP and has_utc:
        low, high = _time_bounds(_message(_bytes(message, 9)))
    elif kind == BOOLEAN:
        num_true = next((sum(_packed(value)) for number, value in fields(_bytes(message, 5)) if number == 1), None)
        if num_true is not None and num_true <= _int(message, 1) > 0:
            low, high = num_true == _int(message, 1), num_true > 0
    is_whole = low is not None and high is not None
    return make(low=low, high=high) if is_whole else make()


def _float_bounds(message: dict[int, int | memoryview]) -> tuple[float | None, float | None]:
    """Return the bounds unless the column contains NaN, which bounds do not cover. A NaN shows in the sum."""
    low, high, total = (_double(message, number) for number in (1, 2, 3))
    if low is None or high is None or total is None or total != total or not low <= high:
        return None, None
    return low, high


def _double(message: dict[int, int | memoryview], number: int) -> float | None:
    if number not in message:
        return None
    value = _bytes(message, number)
    if len(value) != 8:
        raise TailDamaged(f"field {number} is not a double")
    return float(struct.unpack("<d", value)[0])


def _time_bounds(message: dict[int, int | memoryview]) -> tuple[int | None, int | None]:
    """Return bounds of times, widened by a second: files state milliseconds, and writers round differently."""
    low, high = _zigzag(message, 3), _zigzag(message, 4)
    if low is None or high is None:
        return None, None
    return low * 1_000_000 - _SECOND_NS, high * 1_000_000 + _SECOND_NS


def _text(data: memoryview) -> str:
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise TailDamaged(f"a string is not UTF-8: {error}") from error


# -- LZO ---------------------------------------------------------------------------------------------------------------


def lzo_decompress(data: bytes | memoryview, limit: int) -> bytes:
    """Decompress a block of LZO1X, as `Documentation/staging/lzo.rst` of the Linux kernel describes it.

    A block is a sequence of instructions, each of which copies earlier output and then up to three literal bytes.

    Raises:
        LzoDamaged: The bytes cannot be decompressed, or give more than `limit` bytes.
    """
    try:
        return _lzo_blocks(bytes(data), limit)
    except IndexError:
        raise LzoDamaged("the bytes end within an instruction") from None


def _lzo_blocks(data: bytes, limit: int) -> bytes:
    made = bytearray()
    at = 0
    num_literals = 0
    """The literals of the previous instruction; 4 means a run of them."""
    if data[0] > 17:
        at, num_literals = _lzo_literals(data, 1, data[0] - 17, made), min(data[0] - 17, 4)
    while at < len(data):
        code = data[at]
        at += 1
        if code < 16 and num_literals == 0:
            size, at = (code, at) if code else _lzo_length(data, at, 15)
            at, num_literals = _lzo_literals(data, at, size + 3, made), 4
        else:
            if code < 16:
                size, distance = (2, 1) if num_literals < 4 else (3, 2049)
                distance, at = distance + (data[at] << 2) + (code >> 2), at + 1
                num_literals = code & 3
            elif code < 64:
                mask = 7 if code < 32 else 31
                size, at = (code & mask, at) if code & mask else _lzo_length(data, at, mask)
                size += 2
                pair = data[at] | data[at + 1] << 8
                at += 2
                distance = (pair >> 2) + (1 if code >= 32 else _LZO_END + ((code & 8) << 11))
                num_literals = pair & 3
                if code < 32 and distance == _LZO_END:
                    return bytes(made)
            else:
                size = (code >> 5) + 1
                distance, at = 1 + (data[at] << 3) + (code >> 2 & 7), at + 1
                num_literals = code & 3
            _lzo_repeat(made, distance, size)
            at = _lzo_literals(data, at, num_literals, made)
        if len(made) > limit:
            raise LzoDamaged(f"a block has more than {limit} bytes")
    return bytes(made)


def _lzo_length(data: bytes, at: int, size: int) -> tuple[int, int]:
    """Return a length that does not fit in its instruction, and the position after it."""
    while not data[at]:
        size += 255
        at += 1
    return size + data[at], at + 1


def _lzo_literals(data: bytes, at: int, number: int, made: bytearray) -> int:
    if at + number > len(data):
        raise LzoDamaged("the bytes end within literals")
    made += data[at : at + number]
    return at + number


def _lzo_repeat(made: bytearray, distance: int, size: int) -> None:
    """Append the last `distance` bytes again, repeated if `size` is larger."""
    if distance > len(made):
        raise LzoDamaged("a copy starts before the beginning")
    source = made[-distance:] if distance > size else made[-distance:] * (size // distance + 1)
    made += source[:size]

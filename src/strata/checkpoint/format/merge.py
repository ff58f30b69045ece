"""The parts of all ranks become one manifest. Pure: whoever calls it has read the parts and writes the manifest.

A tensor in slices becomes one entry, and its slices must make it up. A whole tensor that several ranks hold with the
same contents is entered once; where ranks differ (the states of their random generators, say), the first keeps the name
and the others' are called `name@rank`, in their structures, too. Ranks whose structures are the same share one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from strata.checkpoint.format import manifest as m
from strata.checkpoint.format import tree
from strata.checkpoint.format.manifest import CheckpointType, DataFile, Manifest, Slice, TensorEntry
from strata.checkpoint.format.part import RankPart, is_of_base
from strata.checkpoint.format.shards import first_overlap, is_grid
from strata.errors import CheckpointInvalid

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

_MAX_NAMED = 8


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What a manifest says that no part does; the first rank's counts."""

    id: str
    step: int
    epoch: int = 0
    type: CheckpointType = CheckpointType.FULL
    """As asked for: whether an incremental checkpoint became one is seen from the parts."""
    created_at_s: float
    parent: str = ""
    metadata: dict[str, Any] = {}
    data_cursor: str = ""
    why: str = ""
    """Why it is not of the type that was asked for, if that is known."""


def merge(parts: Sequence[RankPart], *, head: Head) -> Manifest:
    """
    Raises:
        CheckpointInvalid: The parts are not those of one checkpoint; the message names the tensor and the ranks.
    """
    ordered = _ordered(parts, head)
    if len(ordered) == 1 and not ordered[0].sharded:
        files, tensors, structures, structure_of_rank = _alone(ordered[0])
    else:
        files, tensors, structures, structure_of_rank = _together(ordered)
    type, parent, why = _type(head, files)
    return Manifest(
        id=head.id,
        step=head.step,
        epoch=head.epoch,
        type=type,
        created_at_s=head.created_at_s,
        num_ranks=len(ordered),
        chunk_bytes=ordered[0].chunk_bytes,
        parent=parent,
        files=files,
        tensors=tensors,
        structures=structures,
        structure_of_rank=structure_of_rank,
        metadata=head.metadata,
        data_cursor=head.data_cursor,
        full_bytes=sum(part.full_bytes for part in ordered),
        written_bytes=sum(part.written_bytes for part in ordered),
        model_hash=m.model_hash(tensors),
        why=why,
    )


_Contents = tuple[tuple[DataFile, ...], tuple[TensorEntry, ...], tuple[Any, ...], tuple[int, ...]]
"""Files, tensors, structures, and which of these is whose."""


def _alone(part: RankPart) -> _Contents:
    """There is nothing to unite: for many thousand tensors that is worth a way of its own."""
    _check_names(part.rank, part.structure, {tensor.name for tensor in part.tensors})
    return part.files, part.tensors, (part.structure,), (0,)


def _together(ordered: Sequence[RankPart]) -> _Contents:
    entered = _Merger()
    for part in ordered:
        entered.add(part)
    entries = [*entered.whole(), *entered.united()]
    files, numbers = _numbered(ordered, entries)
    tensors = tuple(
        TensorEntry(
            name=entry.name,
            dtype=entry.dtype,
            shape=entry.shape,
            slices=tuple(_renumbered(piece, numbers[rank]) for rank, piece in entry.slices),
        )
        for entry in sorted(entries, key=lambda entry: entry.order)
    )
    structures, structure_of_rank = _structures(ordered, entered.renames, {tensor.name for tensor in tensors})
    return files, tensors, structures, structure_of_rank


def _ordered(parts: Sequence[RankPart], head: Head) -> list[RankPart]:
    ordered = sorted(parts, key=lambda part: part.rank)
    ranks = [part.rank for part in ordered]
    if not ranks or ranks != list(range(len(ranks))):
        raise CheckpointInvalid(
            f"the parts of {head.id} are of ranks {_named(ranks)}; one of each from 0 on is expected"
        )
    for part in ordered:
        if part.checkpoint != head.id:
            raise CheckpointInvalid(f"the part of rank {part.rank} is of checkpoint {part.checkpoint}, not {head.id}")
        if part.chunk_bytes != ordered[0].chunk_bytes:
            raise CheckpointInvalid(
                f"rank {part.rank} hashes {part.chunk_bytes} bytes at a time, rank 0 {ordered[0].chunk_bytes}; "
                "run the same version of strata on all ranks"
            )
    return ordered


# -- tensors -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _MergedTensor:
    """A tensor of the manifest to be; each slice with the rank that says where it lies."""

    order: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    slices: list[tuple[int, Slice]]


@dataclass(slots=True)
class _Merger:
    renames: dict[int, dict[str, str]] = field(default_factory=dict)
    """Rank → name that its structure uses → name in the manifest."""
    _whole: dict[str, dict[Hashable, tuple[int, int, TensorEntry]]] = field(default_factory=dict)
    """Name → contents → (order, rank, entry): the first rank that has them."""
    _sharded: dict[str, list[tuple[int, TensorEntry]]] = field(default_factory=dict)
    _orders: dict[str, int] = field(default_factory=dict)
    _num_entered: int = 0
    _users: dict[str, list[tuple[int, Hashable]]] = field(default_factory=dict)
    """Name → (rank, contents) of those whose contents are not the first rank's."""

    def add(self, part: RankPart) -> None:
        sharded = set(part.sharded)
        for entry in part.tensors:
            self._num_entered += 1
            if entry.name in sharded:
                self._orders.setdefault(entry.name, self._num_entered)
                self._sharded.setdefault(entry.name, []).append((part.rank, entry))
                continue
            holders = self._whole.setdefault(entry.name, {})
            contents = _contents(entry)
            first = holders.setdefault(contents, (self._num_entered, part.rank, entry))
            if len(holders) > 1 and first is not next(iter(holders.values())):
                self._users.setdefault(entry.name, []).append((part.rank, contents))

    def whole(self) -> list[_MergedTensor]:
        """Each contents once; those that are not the first under their name get another."""
        taken = self._whole.keys() | self._sharded.keys()
        entries: list[_MergedTensor] = []
        for name, holders in self._whole.items():
            if name in self._sharded:
                rank, other = next(iter(holders.values()))[1], self._sharded[name][0][0]
                raise CheckpointInvalid(
                    f"tensor {name!r} is whole on rank {rank} and in slices on rank {other}; give them different names"
                )
            names: dict[Hashable, str] = {}
            for contents, (order, rank, entry) in holders.items():
                names[contents] = own = name if not names else _free(f"{name}@{rank}", taken)
                taken.add(own)
                entries.append(
                    _MergedTensor(order, own, entry.dtype, entry.shape, [(rank, piece) for piece in entry.slices])
                )
            for rank, contents in self._users.get(name, ()):
                self.renames.setdefault(rank, {})[name] = names[contents]
        return entries

    def united(self) -> list[_MergedTensor]:
        return [_united(name, held, self._orders[name]) for name, held in self._sharded.items()]


def _contents(entry: TensorEntry) -> Hashable:
    """What tells whether two ranks hold the same, wherever and however it lies."""
    return entry.dtype, entry.shape, tuple((piece.start, _slice_contents(piece)) for piece in entry.slices)


def _slice_contents(piece: Slice) -> Hashable:
    patches = tuple((patch.unit_bytes, patch.index_hashes, patch.hashes) for patch in piece.patches)
    return piece.shape, piece.hashes, patches


def _free(name: str, taken: set[str]) -> str:
    candidate, number = name, 2
    while candidate in taken:
        candidate, number = f"{name}#{number}", number + 1
    return candidate


def _united(name: str, held: list[tuple[int, TensorEntry]], order: int) -> _MergedTensor:
    first_rank, first = held[0]
    pieces: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, Slice]] = {}
    for rank, entry in held:
        if (entry.dtype, entry.shape) != (first.dtype, first.shape):
            raise CheckpointInvalid(
                f"tensor {name!r} is {first.dtype} {first.shape} on rank {first_rank}, but {entry.dtype} {entry.shape} "
                f"on rank {rank}; all ranks must name the same whole tensor"
            )
        for piece in entry.slices:
            if math.prod(piece.shape) or not pieces:
                other_rank, other = pieces.setdefault((piece.start, piece.shape), (rank, piece))
                if other is not piece and _differ(other, piece):
                    raise CheckpointInvalid(
                        f"tensor {name!r}: ranks {other_rank} and {rank} both hold the slice {piece.shape} at "
                        f"{piece.start}, with different contents; give different tensors different names, or let the "
                        "copies agree"
                    )
    if math.prod(first.shape):
        pieces = {place: kept for place, kept in pieces.items() if math.prod(place[1])}
    _check_tiles(name, first.shape, pieces, ranks=[rank for rank, _ in held])
    return _MergedTensor(order, name, first.dtype, first.shape, [pieces[place] for place in sorted(pieces)])


def _differ(one: Slice, other: Slice) -> bool:
    """Of patched slices only the same patches tell: contents may come about in several ways."""
    return one.hashes != other.hashes and not one.patches and not other.patches


def _check_tiles(
    name: str,
    shape: tuple[int, ...],
    pieces: Mapping[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, Slice]],
    *,
    ranks: list[int],
) -> None:
    places = list(pieces)
    if not math.prod(shape) or (places and is_grid(shape, places)):
        return
    overlap = first_overlap(places)
    if overlap is not None:
        (start, size), (other_start, other_size) = (places[i] for i in overlap)
        rank, other_rank = (pieces[places[i]][0] for i in overlap)
        raise CheckpointInvalid(
            f"tensor {name!r} {shape}: the slice {size} at {start} of rank {rank} overlaps {other_size} at "
            f"{other_start} of rank {other_rank}; every element must be in one slice"
        )
    num_elements = sum(math.prod(size) for _, size in places)
    if num_elements != math.prod(shape):
        raise CheckpointInvalid(
            f"tensor {name!r} {shape} is not made up of its slices: ranks {_named(ranks)} hold {num_elements} of its "
            f"{math.prod(shape)} elements; every rank that has a slice must save it"
        )


# -- files ---------------------------------------------------------------------------------------------------------


def _numbered(
    parts: Sequence[RankPart], entries: Sequence[_MergedTensor]
) -> tuple[tuple[DataFile, ...], list[list[int]]]:
    """All files once, and for each rank what its numbers become. Of bases only those that are still referred to."""
    used: list[set[int]] = [set() for _ in parts]
    for entry in entries:
        for rank, piece in entry.slices:
            used[rank].add(piece.file)
            used[rank].update(patch.file for patch in piece.patches)
    files: dict[str, tuple[int, DataFile, int]] = {}
    numbers: list[list[int]] = []
    for part in parts:
        own = []
        for i, data_file in enumerate(part.files):
            number = -1
            if not is_of_base(data_file) or i in used[part.rank]:
                number, known, other_rank = files.setdefault(data_file.path, (len(files), data_file, part.rank))
                if known is not data_file and (known != data_file or not is_of_base(data_file)):
                    raise CheckpointInvalid(
                        f"ranks {other_rank} and {part.rank} each tell of a file {data_file.path} of their own; "
                        "a file belongs to one rank"
                    )
            own.append(number)
        numbers.append(own)
    return tuple(data_file for _, data_file, _ in files.values()), numbers


def _renumbered(piece: Slice, numbers: list[int]) -> Slice:
    patches = piece.patches
    if any(numbers[patch.file] != patch.file for patch in patches):
        patches = tuple(msgspec.structs.replace(patch, file=numbers[patch.file]) for patch in patches)
    if numbers[piece.file] == piece.file and patches is piece.patches:
        return piece
    return Slice(
        file=numbers[piece.file],
        offset=piece.offset,
        start=piece.start,
        shape=piece.shape,
        hashes=piece.hashes,
        encoding=piece.encoding,
        frames=piece.frames,
        patches=patches,
    )


# -- structures ----------------------------------------------------------------------------------------------------


def _structures(
    parts: Sequence[RankPart], renames: Mapping[int, Mapping[str, str]], known: set[str]
) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    structures: dict[bytes, tuple[int, Any]] = {}
    structure_of_rank = []
    checked: set[bytes] = set()
    for part in parts:
        structure, key = part.structure, msgspec.json.encode(part.structure)
        if key not in checked:
            _check_names(part.rank, structure, known)
            checked.add(key)
        names = renames.get(part.rank)
        if names:
            structure = tree.renamed(structure, names)
            key = msgspec.json.encode(structure)
        structure_of_rank.append(structures.setdefault(key, (len(structures), structure))[0])
    return tuple(structure for _, structure in structures.values()), tuple(structure_of_rank)


def _check_names(rank: int, structure: Any, known: set[str]) -> None:
    missing = [name for name in tree.names_in(structure) if name not in known]
    if missing:
        raise CheckpointInvalid(
            f"the state of rank {rank} has tensor {missing[0]!r}"
            f"{f' and {len(missing) - 1} more' if missing[1:] else ''}, which no rank has written; what is said to be "
            "replicated must be on every rank under the same name, and every slice must be saved by somebody"
        )


# -- the rest ------------------------------------------------------------------------------------------------------


def _type(head: Head, files: Sequence[DataFile]) -> tuple[CheckpointType, str, str]:
    """(type, parent, why), as the files have it."""
    bases = [data_file.path.partition("/")[0] for data_file in files if is_of_base(data_file)]
    if bases:
        if head.type is CheckpointType.FULL:
            why = f"some ranks saved what differs from {bases[0]}, others everything ({head.why or 'as asked for'})"
            return CheckpointType.INCREMENTAL, head.parent or bases[0], why
        return head.type, head.parent or bases[0], head.why
    if head.type is CheckpointType.INCREMENTAL:
        return CheckpointType.FULL, "", head.why or "it needs nothing of a base, so it is complete in itself"
    return head.type, "", head.why


def _named(ranks: Sequence[int]) -> str:
    distinct = sorted(set(ranks))
    shown = ", ".join(map(str, distinct[:_MAX_NAMED])) or "none"
    return f"{shown} and {len(distinct) - _MAX_NAMED} more" if len(distinct) > _MAX_NAMED else shown

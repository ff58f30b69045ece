"""Merge the parts of all ranks into one manifest. The caller reads the parts and writes the manifest.

The slices of a sharded tensor become one entry and must cover it. A whole tensor that several ranks hold with equal
contents gets one entry. Where ranks differ (such as in the state of their random generators), the first rank keeps the
name, and the others are renamed to `name@rank`, in their structures too. Ranks with equal structures share one.
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
    """The fields of a manifest that no part has; those of rank 0 count."""

    id: str
    step: int
    epoch: int = 0
    type: CheckpointType = CheckpointType.FULL
    """The requested type: the parts show whether an incremental checkpoint became one."""
    created_at_s: float
    parent: str = ""
    metadata: dict[str, Any] = {}
    data_cursor: str = ""
    why: str = ""
    """Why the type is not the requested one, if known."""
    called_s: float | None = None
    """When `save` was called. This time and the next two are monotonic ones of the machine of this rank."""
    staged_s: float | None = None
    """When the state was copied, so that the caller went on."""
    written_s: float | None = None
    """When the files of this rank were durable."""


def merge(parts: Sequence[RankPart], *, head: Head) -> Manifest:
    """Merge the parts of all ranks.

    Raises:
        CheckpointInvalid: The parts do not form one checkpoint; the message names the tensor and the ranks.
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
"""Files, tensors, structures, and the structure of each rank."""


def _alone(part: RankPart) -> _Contents:
    """Skip merging for a single rank: it saves time with thousands of tensors."""
    _check_names(part.rank, part.structure, {tensor.name for tensor in part.tensors})
    return part.files, part.tensors, (part.structure,), (0,)


def _together(ordered: Sequence[RankPart]) -> _Contents:
    merger = _Merger()
    for part in ordered:
        merger.add(part)
    entries = [*merger.whole(), *merger.sharded()]
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
    structures, structure_of_rank = _structures(ordered, merger.renames, {tensor.name for tensor in tensors})
    return files, tensors, structures, structure_of_rank


def _ordered(parts: Sequence[RankPart], head: Head) -> list[RankPart]:
    ordered = sorted(parts, key=lambda part: part.rank)
    ranks = [part.rank for part in ordered]
    if not ranks or ranks != list(range(len(ranks))):
        raise CheckpointInvalid(
            f"the parts of {head.id} belong to ranks {_named(ranks)}, expected one part of each rank from 0 on"
        )
    for part in ordered:
        if part.checkpoint != head.id:
            raise CheckpointInvalid(
                f"the part of rank {part.rank} belongs to checkpoint {part.checkpoint}, expected {head.id}"
            )
        if part.chunk_bytes != ordered[0].chunk_bytes:
            raise CheckpointInvalid(
                f"rank {part.rank} hashes chunks of {part.chunk_bytes} bytes, rank 0 of {ordered[0].chunk_bytes}; "
                "run one version of strata on all ranks"
            )
    return ordered


# -- tensors -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _MergedTensor:
    """A tensor of the new manifest; each slice with the rank that wrote it."""

    order: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    slices: list[tuple[int, Slice]]


@dataclass(slots=True)
class _Merger:
    """Collects the tensors of all ranks."""

    renames: dict[int, dict[str, str]] = field(default_factory=dict)
    """Rank → name in its structure → name in the manifest."""
    _whole: dict[str, dict[Hashable, tuple[int, int, TensorEntry]]] = field(default_factory=dict)
    """Name → contents → (order, rank, entry) of the first rank that has them."""
    _sharded: dict[str, list[tuple[int, TensorEntry]]] = field(default_factory=dict)
    _orders: dict[str, int] = field(default_factory=dict)
    _num_entered: int = 0
    _users: dict[str, list[tuple[int, Hashable]]] = field(default_factory=dict)
    """Name → (rank, contents) of ranks whose contents differ from the first rank's."""

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
        """Return the tensors that ranks hold whole, each contents once, renamed where ranks differ."""
        taken = self._whole.keys() | self._sharded.keys()
        entries: list[_MergedTensor] = []
        for name, holders in self._whole.items():
            if name in self._sharded:
                rank, other = next(iter(holders.values()))[1], self._sharded[name][0][0]
                raise CheckpointInvalid(
                    f"tensor {name!r} is whole on rank {rank} and sharded on rank {other}; give them different names"
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

    def sharded(self) -> list[_MergedTensor]:
        """Return the tensors that ranks hold in slices."""
        return [_join_slices(name, held, self._orders[name]) for name, held in self._sharded.items()]


def _contents(entry: TensorEntry) -> Hashable:
    """Return a key that is equal for equal contents, wherever and however they are stored."""
    return entry.dtype, entry.shape, tuple((piece.start, _slice_contents(piece)) for piece in entry.slices)


def _slice_contents(piece: Slice) -> Hashable:
    patches = tuple((patch.unit_bytes, patch.index_hashes, patch.hashes) for patch in piece.patches)
    return piece.shape, piece.hashes, patches


def _free(name: str, taken: set[str]) -> str:
    candidate, number = name, 2
    while candidate in taken:
        candidate, number = f"{name}#{number}", number + 1
    return candidate


def _join_slices(name: str, held: list[tuple[int, TensorEntry]], order: int) -> _MergedTensor:
    first_rank, first = held[0]
    pieces: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, Slice]] = {}
    for rank, entry in held:
        if (entry.dtype, entry.shape) != (first.dtype, first.shape):
            raise CheckpointInvalid(
                f"tensor {name!r} is {first.dtype} {first.shape} on rank {first_rank}, but {entry.dtype} {entry.shape} "
                f"on rank {rank}; dtype and shape of the whole tensor must agree"
            )
        for piece in entry.slices:
            if math.prod(piece.shape) or not pieces:
                other_rank, other = pieces.setdefault((piece.start, piece.shape), (rank, piece))
                if other is not piece and _differ(other, piece):
                    raise CheckpointInvalid(
                        f"tensor {name!r}: ranks {other_rank} and {rank} both hold the slice {piece.shape} at "
                        f"{piece.start} with different contents; synchronize the copies, or give different tensors "
                        "different names"
                    )
    if math.prod(first.shape):
        pieces = {place: kept for place, kept in pieces.items() if math.prod(place[1])}
    _check_tiles(name, first.shape, pieces, ranks=[rank for rank, _ in held])
    return _MergedTensor(order, name, first.dtype, first.shape, [pieces[place] for place in sorted(pieces)])


def _differ(one: Slice, other: Slice) -> bool:
    """Return whether two slices differ for certain. Patched slices may be equal in spite of different patches."""
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
            f"tensor {name!r} {shape}: the slice {size} at {start} of rank {rank} overlaps the slice {other_size} at "
            f"{other_start} of rank {other_rank}; every element must belong to exactly one slice"
        )
    num_elements = sum(math.prod(size) for _, size in places)
    if num_elements != math.prod(shape):
        raise CheckpointInvalid(
            f"tensor {name!r} {shape} is not covered by its slices: ranks {_named(ranks)} hold {num_elements} of its "
            f"{math.prod(shape)} elements; every rank that holds a slice must save it"
        )


# -- files ---------------------------------------------------------------------------------------------------------


def _numbered(
    parts: Sequence[RankPart], entries: Sequence[_MergedTensor]
) -> tuple[tuple[DataFile, ...], list[list[int]]]:
    """Return all files, each once, and for each rank its new file indices. Unused files of bases are dropped."""
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
                        f"ranks {other_rank} and {part.rank} both list a file {data_file.path}; a file belongs to one "
                        "rank"
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
            f"{f' and {len(missing) - 1} more' if missing[1:] else ''}, which no rank has written; a replicated tensor "
            "must exist on every rank under the same name, and every slice must be saved by some rank"
        )


# -- the rest ------------------------------------------------------------------------------------------------------


def _type(head: Head, files: Sequence[DataFile]) -> tuple[CheckpointType, str, str]:
    """Return (type, parent, why), according to the files."""
    bases = [data_file.path.partition("/")[0] for data_file in files if is_of_base(data_file)]
    if bases:
        if head.type is CheckpointType.FULL:
            why = f"some ranks saved a delta from {bases[0]}, others their full state ({head.why or 'as requested'})"
            return CheckpointType.INCREMENTAL, head.parent or bases[0], why
        return head.type, head.parent or bases[0], head.why
    if head.type is CheckpointType.INCREMENTAL:
        return CheckpointType.FULL, "", head.why or "nothing of a base is unchanged, so it needs no base"
    return head.type, "", head.why


def _named(ranks: Sequence[int]) -> str:
    distinct = sorted(set(ranks))
    shown = ", ".join(map(str, distinct[:_MAX_NAMED])) or "none"
    return f"{shown} and {len(distinct) - _MAX_NAMED} more" if len(distinct) > _MAX_NAMED else shown

"""`CheckpointManager`: saving in the background, loading what can be trusted, keeping what is wanted."""

from __future__ import annotations

import fnmatch
import logging
import secrets
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from strata.checkpoint import inspecting, layout, reading, retention, tree, writing
from strata.checkpoint import manifest as m
from strata.checkpoint.catalog import Catalog
from strata.checkpoint.manifest import CheckpointType, Manifest
from strata.checkpoint.metadata import CheckpointMetadata, of_manifest
from strata.checkpoint.rebuilding import rebuild
from strata.checkpoint.saving import Save
from strata.checkpoint.staging import Staging
from strata.clock import SystemClock
from strata.errors import (
    CheckpointBusy,
    CheckpointInvalid,
    ConfigError,
    InvalidArgument,
    NoCheckpoint,
    StrataError,
)
from strata.storage import Store, Watch, open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType
    from typing import Self

    from strata.checkpoint.layout import Layout
    from strata.checkpoint.retention import Policy
    from strata.checkpoint.tree import Flat
    from strata.clock import Clock

log = logging.getLogger(__name__)

T = TypeVar("T")
WhenBusy = Literal["wait", "skip", "raise"]
_SCHEMES = {"s3": "s3", "gcs": "gs", "gs": "gs", "azure": "az", "az": "az"}
_MODEL_KEYS = ("model", "module", "params")
_OPTIMIZER_KEYS = ("optimizer", "optimizers", "optim", "opt")


class CheckpointManager:
    """Saves and loads checkpoints in one place.

    `save` copies the state and returns; the rest happens in a thread. Calls may come from several threads; one save is
    under way at a time.
    """

    def __init__(
        self,
        storage_path: str | None = None,
        *,
        keep_count: int | None = None,
        keep_every: int | None = None,
        keep_best: tuple[str, Literal["min", "max"]] | None = None,
        policies: Sequence[Policy] = (),
        when_busy: WhenBusy = "wait",
        bucket: str | None = None,
        storage_type: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        store: Store | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`storage_path` is a directory or a URL (`s3://bucket/prefix`); or `bucket` with `storage_type` names it.

        `when_busy` says what `save` does while the last one is still being written: wait for it, skip this one (the
        handle says so), or raise `CheckpointBusy`.

        Raises:
            ConfigError: The place or a policy makes no sense.
        """
        if when_busy not in ("wait", "skip", "raise"):
            raise ConfigError(f"when_busy={when_busy!r} is not known; use wait, skip or raise", field="when_busy")
        self._store = store or open_store(_place(storage_path, bucket, storage_type), storage_options)
        self._policies = _policies(keep_count, keep_every, keep_best, policies)
        self._when_busy = when_busy
        self._clock = clock or SystemClock()
        self._catalog = Catalog(self._store)
        self._staging = Staging()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="strata-checkpoint")
        self._saving = threading.Lock()
        """Held from the beginning of the copy until the staging memory is free again."""
        self._last: Save | None = None
        self._failed: Save | None = None
        """A save that failed and that nobody has heard of yet."""
        self._closed = False

    # -- saving ----------------------------------------------------------------------------------------------------

    def save(
        self,
        state: Any,
        *,
        step: int,
        epoch: int = 0,
        checkpoint_type: CheckpointType | str = CheckpointType.FULL,
        metadata: Mapping[str, Any] | None = None,
        data_cursor: str = "",
    ) -> Save:
        """Copies `state` and returns; `.wait()` on what is returned waits until it is durable.

        Raises:
            InvalidArgument: Something in the state cannot be stored; nothing was written.
            CheckpointBusy: Another save is under way, and `when_busy="raise"`.
        """
        start_s = time.perf_counter()
        self._require_open()
        kind, why = _kind(checkpoint_type), ""
        if kind is CheckpointType.INCREMENTAL:
            kind, why = CheckpointType.FULL, "incremental saves are not built yet, so all of it was saved"
        flat = tree.flatten(_part(state, kind))
        name = new_id(_count(step, "step"))
        plan = layout.plan(flat.leaves, {"strata": str(m.VERSION), "id": name, "rank": "0"})
        save = Save(
            CheckpointMetadata(
                id=name,
                step=step,
                epoch=_count(epoch, "epoch"),
                path=f"{self._store.url.rstrip('/')}/{name}",
                size_bytes=plan.size_bytes,
                checkpoint_type=kind,
                metadata=_checked_metadata(metadata),
                created_at_s=self._clock.wall_s(),
                full_bytes=plan.size_bytes,
                why=why,
            ),
            num_bytes=plan.size_bytes,
        )
        if not self._take_turn(save):
            return save
        try:
            data = self._staging.fill(plan, flat.leaves)
            save.staged, save.stall_s = True, time.perf_counter() - start_s
            self._last = save
            self._writer.submit(self._finish, save, flat, plan, data, data_cursor)
        except BaseException:
            self._saving.release()
            raise
        return save

    def prepare(self, state: Any) -> None:
        """Makes the memory ready that a save of such a state needs: the first one then stalls no longer than others."""
        flat = tree.flatten(state)
        with self._saving:
            self._staging.reserve(layout.plan(flat.leaves, {}).size_bytes + layout.ALIGNMENT)

    def wait(self) -> None:
        """Returns when no save is under way.

        Raises:
            CheckpointError, StorageError: Why one has failed that nobody waited for.
        """
        if not self._closed:
            self._writer.submit(lambda: None).result()  # it has one thread
        failed, self._failed = self._failed, None
        if failed is not None and failed.error is not None and not failed.was_heard:
            raise failed.error

    def _take_turn(self, save: Save) -> bool:
        if self._saving.acquire(blocking=self._when_busy == "wait"):
            return True
        under_way = self._last.id if self._last is not None else "another"
        if self._when_busy == "raise":
            raise CheckpointBusy(f"checkpoint {under_way} is still being written; wait for it, or use when_busy='skip'")
        save.skipped(f"{under_way} is still being written")
        return False

    def _finish(self, save: Save, flat: Flat, plan: Layout, data: memoryview, data_cursor: str) -> None:
        try:
            try:
                manifest = self._write(save, flat, plan, data, data_cursor)
            finally:
                data.release()
                self._saving.release()
            save.succeeded(of_manifest(manifest, self._store.url))
        except BaseException as error:  # noqa: BLE001 - the edge of the thread: whoever waits hears it
            self._clear_away(save.id)
            self._failed = save
            log.error("checkpoint %s was not saved: %s", save.path, error)  # noqa: TRY400 - whoever waits gets it
            save.failed(error)
            return
        self._tidy()

    def _write(self, save: Save, flat: Flat, plan: Layout, data: memoryview, data_cursor: str) -> Manifest:
        data_file, hashes = writing.write_file(
            self._store, save.id, plan, data, rank=0, chunk_bytes=layout.CHUNK_BYTES, watch=save.watch
        )
        info = save.metadata
        tensors = tuple(
            m.TensorEntry(
                name=place.name,
                dtype=place.dtype.name,
                shape=place.shape,
                slices=(
                    m.Slice(
                        file=0,
                        offset=place.offset,
                        start=(0,) * len(place.shape),
                        shape=place.shape,
                        hashes=hashes[place.name],
                    ),
                ),
            )
            for place in plan.places
        )
        manifest = Manifest(
            id=info.id,
            step=info.step,
            epoch=info.epoch,
            type=info.checkpoint_type,
            created_at_s=info.created_at_s,
            num_ranks=1,
            chunk_bytes=layout.CHUNK_BYTES,
            files=(data_file,),
            tensors=tensors,
            structures=(flat.structure,),
            structure_of_rank=(0,),
            metadata=info.metadata,
            data_cursor=data_cursor,
            full_bytes=plan.size_bytes,
            written_bytes=plan.size_bytes,
            model_hash=m.model_hash(tensors),
            why=info.why,
        )
        save.watch.check()
        self._store.put(f"{info.id}/{m.FILE_NAME}", m.encode(manifest), if_absent=True)
        self._catalog.add(manifest)
        return manifest

    # -- looking ---------------------------------------------------------------------------------------------------

    def list(self) -> Sequence[CheckpointMetadata]:
        """All that are committed, oldest first."""
        return [of_manifest(manifest, self._store.url) for manifest in self._catalog.manifests()]

    def get(self, *, step: int | None = None, id: str | None = None) -> CheckpointMetadata:
        """
        Raises:
            NoCheckpoint: There is none such.
        """
        return of_manifest(self._catalog.find(step=step, id=id), self._store.url)

    def latest(self) -> CheckpointMetadata | None:
        manifests = self._catalog.manifests()
        return of_manifest(manifests[-1], self._store.url) if manifests else None

    @property
    def problems(self) -> dict[str, str]:
        """What the last look passed over: id → why."""
        return dict(self._catalog.problems)

    # -- loading ---------------------------------------------------------------------------------------------------

    def load(
        self,
        *,
        step: int | None = None,
        id: str | None = None,
        only: Iterable[str] | None = None,
        map_location: Any = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> Any:
        """The state as it was saved. Without `step` or `id`, of the newest checkpoint that can be trusted: one that
        cannot is put into quarantine, and the one before it is tried.

        `only` takes patterns of tensor names (`["model.*"]`); nothing else is read.

        Raises:
            NoCheckpoint: There is none.
            CheckpointInvalid: The one that was named cannot be trusted; the message names file and tensor.
        """
        watch = Watch(on_progress) if on_progress else Watch()
        return self._trusted(step, id, lambda manifest: self._load(manifest, only, map_location, watch))

    def _trusted(self, step: int | None, id: str | None, use: Callable[[Manifest], T]) -> T:
        """Of the one that is named; else of the newest of which `use` finds nothing wrong."""
        if step is not None or id is not None:
            return use(self._catalog.find(step=step, id=id))
        refused = []
        for manifest in reversed(self._catalog.manifests()):
            try:
                return use(manifest)
            except CheckpointInvalid as error:
                log.warning("checkpoint %s cannot be trusted, the one before it is tried: %s", manifest.id, error)
                refused.append(f"{manifest.id}: {error}")
                self._catalog.quarantine(manifest.id, str(error))
        reasons = "; ".join([*refused, *(f"{id}: {why}" for id, why in self._catalog.problems.items())][:5])
        raise NoCheckpoint(f"there is no checkpoint in {self._store.url}" + (f" ({reasons})" if reasons else ""))

    def _load(self, manifest: Manifest, only: Iterable[str] | None, map_location: Any, watch: Watch) -> Any:
        structure = manifest.structures[manifest.structure_of_rank[0]]
        names = tree.names_in(structure)  # also: it is one, which `select` believes
        if only is not None:
            patterns = [only] if isinstance(only, str) else list(only)
            structure = tree.select(structure, lambda name: any(fnmatch.fnmatchcase(name, p) for p in patterns))
            if structure is None:
                raise InvalidArgument(f"checkpoint {manifest.id} has no tensor that matches {patterns}", field="only")
            names = tree.names_in(structure)
        tensors = reading.read_tensors(self._store, manifest, names, watch=watch)
        return rebuild(structure, manifest.tensors, tensors, map_location=map_location)

    def restore(
        self, into: Mapping[str, Any], *, step: int | None = None, id: str | None = None, strict: bool = True
    ) -> int:
        """Loads the parts of a saved dict into modules, optimizers and whatever else has `load_state_dict`.

        Gives the step that it was saved at.

        Raises:
            NoCheckpoint: There is none.
            InvalidArgument: `strict`, and the checkpoint has no such part.
        """
        wanted = [pattern for key in into for pattern in (key, f"{key}.*")]

        def load(manifest: Manifest) -> tuple[Manifest, Any]:
            return manifest, self._load(manifest, None if strict else wanted, None, Watch())

        manifest, state = self._trusted(step, id, load)
        missing = [key for key in into if not isinstance(state, Mapping) or key not in state]
        if missing and strict:
            raise InvalidArgument(
                f"checkpoint {manifest.id} has no part {', '.join(map(repr, missing))}; "
                "strict=False restores the others",
                field="into",
            )
        for key, target in into.items():
            if key not in missing:
                _load_into(target, state[key], strict=strict)
        return manifest.step

    # -- checking and removing -------------------------------------------------------------------------------------

    def verify(self, *, step: int | None = None, id: str | None = None) -> CheckpointMetadata:
        """Reads every byte of a checkpoint and compares it with its hash.

        Raises:
            CheckpointInvalid: Something differs; the message says what.
        """
        manifest = self._catalog.find(step=step, id=id)
        reading.verify(self._store, manifest, watch=Watch())
        return of_manifest(manifest, self._store.url)

    def delete(self, *, step: int | None = None, id: str | None = None) -> None:
        """
        Raises:
            NoCheckpoint: There is none such.
            InvalidArgument: Another checkpoint refers to it.
        """
        files = inspecting.removable(self._store, self._catalog, step=step, id=id)
        inspecting.remove(self._store, self._catalog, files)

    def _clear_away(self, id: str) -> None:
        """What a failed save left; if that fails too, it is collected later."""
        try:
            self._store.delete([listed.key for listed in self._store.walk(id)])
        except StrataError as error:
            log.warning("the leftovers of %s stay for now: %s", id, error)

    def _tidy(self) -> None:
        """After a commit, never before: what the policies let go, and what dead writers left."""
        try:
            checkpoints = self.list()
            for removal in retention.removals(checkpoints, self._policies):
                log.info("checkpoint %s goes: %s", removal.id, removal.reason)
                inspecting.remove(self._store, self._catalog, inspecting.files_of(self._store, removal.id))
            for files in inspecting.leftovers(self._store):
                if files.is_given_up(now_s=self._clock.wall_s()):
                    log.info("the leftovers of %s go: nobody wrote into it for an hour", files.id)
                    inspecting.collect(self._store, files)
        except StrataError as error:
            log.warning("old checkpoints could not be removed; the next save tries again: %s", error)

    # -- life ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Waits for the save under way.

        Raises:
            CheckpointError, StorageError: Why a save has failed that nobody waited for.
        """
        if self._closed:
            return
        self._closed = True
        self._writer.shutdown()
        try:
            self.wait()
        finally:
            self._staging.close()
            self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except StrataError:
            if error is None:  # else that one matters more
                raise

    def _require_open(self) -> None:
        if self._closed:
            raise InvalidArgument("the CheckpointManager is closed; make a new one")


def _load_into(target: Any, part: Any, *, strict: bool) -> None:
    """Only torch's modules know `strict`; optimizers, schedulers and loaders take all or nothing."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(target, torch.nn.Module):
        target.load_state_dict(part, strict=strict)
    else:
        target.load_state_dict(part)


def new_id(step: int) -> str:
    """The step for people and for the order of names; the rest so that no name is ever used twice."""
    return f"step-{step:012d}-{secrets.token_hex(8)}"


def _place(storage_path: str | None, bucket: str | None, storage_type: str | None) -> str:
    if bucket is None:
        if storage_path is None:
            raise ConfigError("say where: storage_path='…', or bucket= and storage_type=", field="storage_path")
        if storage_type not in (None, "local"):
            raise ConfigError(
                "storage_type goes with bucket=; write storage_path as a URL instead", field="storage_type"
            )
        return storage_path
    if storage_type is None or storage_type in ("local", "file"):
        return bucket if storage_path is None else f"{bucket.rstrip('/')}/{storage_path}"
    scheme = _SCHEMES.get(storage_type)
    if scheme is None:
        raise ConfigError(f"storage_type={storage_type!r} is not known; use one of {', '.join(_SCHEMES)}, local")
    return "/".join(filter(None, (f"{scheme}://{bucket}", storage_path)))


def _policies(
    keep_count: int | None,
    keep_every: int | None,
    keep_best: tuple[str, Literal["min", "max"]] | None,
    more: Sequence[Policy],
) -> list[Policy]:
    found: list[Policy] = list(more)
    if keep_count is not None:
        found.append(retention.KeepCount(keep_count))
    if keep_every is not None:
        found.append(retention.KeepEvery(keep_every))
    if keep_best is not None:
        found.append(retention.KeepBest(*keep_best))
    return found


def _kind(value: CheckpointType | str) -> CheckpointType:
    try:
        return value if isinstance(value, CheckpointType) else CheckpointType(value.upper())
    except (ValueError, AttributeError):
        names = ", ".join(kind.name for kind in CheckpointType)
        raise InvalidArgument(f"checkpoint_type={value!r} is not known; use one of {names}") from None


def _part(state: Any, kind: CheckpointType) -> Any:
    """What of the state belongs to a checkpoint of this type."""
    keys = {CheckpointType.MODEL_ONLY: _MODEL_KEYS, CheckpointType.OPTIMIZER_ONLY: _OPTIMIZER_KEYS}.get(kind)
    if keys is None or not isinstance(state, Mapping):
        return state
    part = {key: value for key, value in state.items() if key in keys}
    if not part:
        raise InvalidArgument(
            f"{kind.name} saves what stands under {' or '.join(map(repr, keys))}; the state has "
            f"{', '.join(map(repr, list(state)[:10])) or 'nothing'}",
            field="state",
        )
    return part


def _count(value: Any, field: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 53:
        raise InvalidArgument(f"{field}={value!r} must be a whole number from 0 on", field=field)
    return value


def _checked_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    try:
        data = msgspec.json.encode(dict(metadata or {}))
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"metadata must be JSON: {error}", field="metadata") from None
    if len(data) > m.MAX_METADATA_BYTES:
        raise InvalidArgument(
            f"metadata has {len(data)} bytes as JSON, more than {m.MAX_METADATA_BYTES}; large things belong into "
            "the state",
            field="metadata",
        )
    decoded: dict[str, Any] = msgspec.json.decode(data, type=dict[str, Any])
    return decoded

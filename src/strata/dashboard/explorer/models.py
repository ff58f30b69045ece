"""The models of the explorer's answers, from which its OpenAPI description is generated."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from strata.checkpoint.format.manifest import CheckpointType  # noqa: TC001 - evaluated at run time
from strata.coordinator.http.models import Model, Page

ChangeState = Literal["changed", "same", "added", "removed", "reshaped"]


class ExplorerPlace(Model):
    place: str = Field(description="The id of the place in other requests.")
    label: str
    location: str = Field(description="The path or URL.")
    kind: Literal["checkpoints", "checkpoint", "file"]


class PlaceList(Model):
    items: list[ExplorerPlace]


class ExplorerCheckpoint(Model):
    id: str
    kind: Literal["strata", "safetensors"]
    step: int | None = Field(description="Null for a plain safetensors file, like other fields that it does not have.")
    epoch: int | None
    type: CheckpointType | None
    created_at_s: float = Field(description="Unix time.")
    size_bytes: int = Field(description="The size of its own files.")
    full_bytes: int = Field(description="The size of the whole state.")
    num_tensors: int
    num_ranks: int | None
    parent: str = Field(description="The checkpoint that a delta was computed against; empty if there is none.")
    bases: list[str] = Field(description="The checkpoints whose files it needs.")
    children: list[str] = Field(description="The checkpoints that are deltas against this one.")
    branch: int = Field(description="How often training had gone back to an earlier step before.")
    duration_s: float | None = Field(description="How long the save took; null if it was not measured.")
    stall_s: float | None = Field(description="How long the save blocked training on rank 0; null if not measured.")
    metadata: dict[str, Any] = Field(description="What the caller passed to `save`, or the metadata of the file.")
    why: str = Field(description="Why the type is not the requested one; empty if it is.")
    model_hash: str


class ExplorerCheckpointPage(Page[ExplorerCheckpoint]):
    problems: dict[str, str] = Field(description="Checkpoints that are ignored, and why.")


class TensorStatistics(Model):
    num_elements: int
    min: float | int | None = Field(description="Of finite elements; null if there is none.")
    max: float | int | None
    mean: float | None
    std: float | None
    norm: float | None = Field(description="The Euclidean norm; null if it overflows.")
    num_nan: int
    num_inf: int


class TensorChange(Model):
    state: ChangeState = Field(description="`changed` until it is measured, if hashes cannot decide it.")
    relative_l2: float | None = Field(description="‖new − old‖ / ‖old‖; null if not measured, or old is zero.")
    l2: float | None
    max_abs: float | int | None
    num_different: int | None = Field(description="Null if not measured.")
    num_not_finite: int | None
    at_least: float | None = Field(description="A lower bound of relative_l2 from stored norms; null if unknown.")


class Tensor(Model):
    name: str
    dtype: str
    shape: list[int]
    num_elements: int
    num_bytes: int
    statistics: TensorStatistics | None = Field(description="Null if they are not stored and were not computed.")
    num_slices: int
    num_patches: int
    num_dead_rows: int | None = Field(description="Rows of zeros; null if not counted yet.")
    change: TensorChange | None = Field(description="Null without `against`.")


class TreeNode(Model):
    kind: Literal["group", "tensor"]
    label: str
    path: str
    num_tensors: int
    num_bytes: int
    num_elements: int
    num_nan: int | None
    num_inf: int | None
    tensor: Tensor | None


class ScanState(Model):
    num_needed: int = Field(description="Tensors whose answer needs data.")
    num_done: int
    is_complete: bool = Field(description="If false, repeat the request: it continues where this one stopped.")
    read_bytes: int = Field(description="Bytes that this request read.")
    problems: dict[str, str] = Field(description="Tensors that were skipped, and why.")


class TensorPage(Page[Tensor]):
    scan: ScanState


class TensorHistogram(Model):
    name: str
    edges: list[float] = Field(description="One more than counts; both are empty if no element is finite.")
    counts: list[int]
    num_below: int
    num_above: int
    num_nan: int
    num_inf: int
    num_elements: int
    range_from: Literal["statistics", "data", "request"]
    read_bytes: int


class TensorHeatMap(Model):
    name: str
    num_rows: int
    num_columns: int
    row_edges: list[int]
    column_edges: list[int]
    means: list[list[float | None]] = Field(description="Means of finite elements; null for a block without one.")
    num_not_finite: list[list[int]]
    min: float | None
    max: float | None
    read_bytes: int


class TensorRows(Model):
    name: str
    num_rows: int
    row_edges: list[int]
    norm_min: list[float | None]
    norm_mean: list[float | None]
    norm_max: list[float | None]
    num_dead: int
    dead: list[int] = Field(description="The first dead rows, 100 at most, as of the others.")
    num_with_nan: int
    with_nan: list[int]
    num_with_inf: int
    with_inf: list[int]
    read_bytes: int


class SingularValues(Model):
    name: str
    num_rows: int
    num_columns: int
    values: list[float | None] = Field(description="Largest first; null if one overflows.")
    condition: float | None
    stable_rank: float | None
    effective_rank: float | None
    read_bytes: int


class TensorValues(Model):
    name: str
    start: list[int]
    shape: list[int]
    values: list[bool | int | float | str] = Field(description="Row-major; text if a JSON number is not exact.")
    read_bytes: int


class CheckpointRef(Model):
    place: str
    id: str


class TensorSide(Model):
    dtype: str
    shape: list[int]
    statistics: TensorStatistics | None


class ComparedTensor(Model):
    name: str
    old: TensorSide | None
    new: TensorSide | None
    change: TensorChange


class ComparedPage(Page[ComparedTensor]):
    old: CheckpointRef
    new: CheckpointRef
    num_same: int
    num_changed: int
    num_added: int
    num_removed: int
    num_reshaped: int
    same_structure: bool
    scan: ScanState


class SideHistogram(Model):
    counts: list[int]
    num_nan: int
    num_inf: int
    num_elements: int


class ComparedHistogram(Model):
    name: str
    edges: list[float]
    old: SideHistogram
    new: SideHistogram
    change: TensorChange
    read_bytes: int


class FollowedTensor(Model):
    id: str
    step: int | None
    epoch: int | None
    created_at_s: float
    is_present: bool
    dtype: str | None
    shape: list[int] | None
    statistics: TensorStatistics | None
    changed: bool | None = Field(description="Whether it differs from the checkpoint before, by hashes.")
    source: Literal["stored", "computed", "none"] = Field(description="Where the statistics are from.")


class FollowedPage(Page[FollowedTensor]):
    name: str
    scan: ScanState


class VerifyRequest(Model):
    place: str = Field(min_length=1, max_length=200)
    id: str = Field(min_length=1, max_length=1_000)


class VerifyTask(Model):
    task: str
    kind: Literal["verify"]
    place: str
    id: str
    state: Literal["running", "done", "failed", "cancelled"] = Field(description="`done`: every byte is intact.")
    done_bytes: int
    total_bytes: int
    problem: str = Field(description="What is damaged, with the file and the tensor; empty if nothing is.")
    started_at_s: float
    ended_at_s: float | None


class TaskList(Model):
    items: list[VerifyTask]

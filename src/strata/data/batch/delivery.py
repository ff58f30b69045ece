"""From the decoded rows of a row group to batches: the types of columns are decided once and applied by every worker.

`Deliverer` holds those decisions. The estimates of how much memory a row takes live here too, because they follow from
the same types.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from strata.data.batch.conversion import Converter
from strata.data.batch.output import Presenter
from strata.data.batch.policy import Kind, decide
from strata.data.plan.lengths import cut_lists
from strata.errors import InvalidArgument, TransformFailed
from strata.lifecycle import renewed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from strata.data.batch.columns import Chunk
    from strata.data.batch.policy import Policy
    from strata.data.batch.vocabulary import Vocabulary
    from strata.data.config import BatchConfig
    from strata.data.plan.lengths import RowLengths
    from strata.data.plan.plan import Plan

VARIABLE_BYTES = 32
"""Estimated minimum size of a value without a fixed width."""
GROWTH = 3
"""Estimated ratio of decoded to read bytes, which holds for strings and numbers in Parquet."""


class Deliverer:
    """Converts decoded tables to chunks, and chunks to batches. Safe for use by several threads.

    Without a transform, the types are decided before anything is read. With one, the columns are unknown until it has
    run, so they are decided when its first result arrives.
    """

    def __init__(
        self,
        plan: Plan,
        config: BatchConfig,
        policies: tuple[Policy, ...] | None,
        vocabularies: Mapping[str, Vocabulary],
        *,
        row_bytes: int,
        lengths: RowLengths | None = None,
        max_length: int | None = None,
        cut_columns: Sequence[str] = (),
    ) -> None:
        """
        `policies`: None if a transform must show the columns first. `vocabularies`: by column.
        `max_length`: cuts longer lists in these columns, of which the first decides the length of a row.
        """
        self._plan = plan
        self._config = config
        self._is_transformed = config.transform is not None
        self._lock = renewed(threading.Lock())
        self.vocabularies = vocabularies
        self.row_bytes = row_bytes
        """Estimated bytes of a delivered row, the same on all ranks: it decides the number of lanes."""
        self.lengths = lengths
        """The lengths of rows, if batches are made by bytes or tokens."""
        self._max_length = max_length
        self._cut_columns = cut_columns
        self._made = None if policies is None else self._make(policies)

    @property
    def policies(self) -> tuple[Policy, ...] | None:
        """How each column is delivered; with a transform, None until it has run."""
        return None if self._made is None else self._made[0]

    def convert(self, number: int, table: pa.Table) -> Chunk:
        """Convert the rows of a row group.

        Raises:
            TransformFailed: The transform returned other columns than before.
            NullsFound, SchemaMismatch: The rows do not fit the policies.
        """
        if self._max_length is not None and self.lengths is not None:
            table = cut_lists(table, self._cut_columns, self._plan.columns, self._max_length)
        made = self._made
        if made is None:
            with self._lock:
                if self._made is None:
                    self._made = self._make(decide_policies(self._config, table.schema, {}))
                made = self._made
        if self._is_transformed:
            self._check_columns(table, made[0], number)
        return made[1].convert(table, self._plan.describe(number)).pack()

    def present(self, chunk: Chunk, sizes: Sequence[int]) -> list[Any]:
        """Cut a chunk into batches of these sizes, in the output format."""
        assert self._made is not None, "a chunk comes from convert"
        return self._made[2].present(chunk, sizes)

    def _check_columns(self, table: pa.Table, policies: Sequence[Policy], number: int) -> None:
        """Check that the columns do not depend on which row group was transformed first."""
        known = {policy.path[0] for policy in policies}
        if known != set(table.column_names):
            odd = sorted(known ^ set(table.column_names))
            raise TransformFailed(
                f"transform returned columns {sorted(table.column_names)} for {self._plan.describe(number)}, and "
                f"{sorted(known)} for another row group (they differ in {odd[0]!r}); always return the same columns"
            )

    def _make(self, policies: tuple[Policy, ...]) -> tuple[tuple[Policy, ...], Converter, Presenter]:
        for policy in policies:
            if policy.is_coded and policy.name not in self.vocabularies:
                raise InvalidArgument(
                    f"column {policy.name!r} comes from the transform, so its values are unknown before it has run; "
                    f"pass them: vocabularies={{{policy.name!r}: [...]}}",
                    field="vocabularies",
                )
        converter = Converter(policies, self.vocabularies, is_private=not self._is_transformed)
        return policies, converter, Presenter(self._config.output_format, policies)


def decide_policies(config: BatchConfig, schema: pa.Schema, null_counts: Mapping[str, int]) -> tuple[Policy, ...]:
    """Return how each column is delivered."""
    policies = decide(
        schema,
        null_counts,
        output_format=config.output_format,
        strings=config.strings,
        string_width=config.string_width,
        nulls=config.nulls,
        decimals=config.decimals,
    )
    if config.sequences == "ragged":
        return policies
    if not any(policy.kind is Kind.RAGGED for policy in policies):
        raise InvalidArgument(
            f"sequences={config.sequences!r} applies to lists of numbers, and no delivered column has them; leave it "
            "out",
            field="sequences",
        )
    return tuple(
        replace(policy, sequences=config.sequences) if policy.kind is Kind.RAGGED else policy for policy in policies
    )


def delivered_schema(plan: Plan) -> pa.Schema:
    return pa.schema([plan.schema.field(name) for name in plan.columns])


def delivered_nulls(plan: Plan) -> Mapping[str, int]:
    """Return the null counts of the plan, unless deletes or a filter may remove the rows with nulls."""
    return plan.null_counts if plan.condition is None and (plan.unit_rows == plan.unit_total_rows).all() else {}


def lanes_that_fit(plan: Plan, row_bytes: int, split_bytes: int, at_most: int) -> int:
    """Return how many lanes of a rank fit into memory: each holds one decoded row group while the next is decoded."""
    return max(1, min(at_most, split_bytes // (int(plan.unit_rows.max(initial=1)) * row_bytes)))


def estimate_row_bytes(plan: Plan) -> int:
    """Return the estimated bytes of a delivered row, at least 1; for types of variable width, from the bytes read."""
    widths = _widths(plan)
    known = sum(VARIABLE_BYTES if width is None else width for width in widths)
    if None in widths and plan.num_units:
        known = max(known, GROWTH * int(plan.unit_bytes.sum()) // max(1, int(plan.unit_total_rows.sum())))
    return max(1, known)


def has_variable_width(plan: Plan) -> bool:
    """Return whether the types do not determine the width of a row."""
    return None in _widths(plan)


def _widths(plan: Plan) -> list[int | None]:
    return [_width_bytes(field.type) for field in delivered_schema(plan)]


def _width_bytes(kind: pa.DataType) -> int | None:
    """Return the width of a value, or None if values differ in width."""
    if isinstance(kind, pa.BaseExtensionType):
        return _width_bytes(kind.storage_type)
    if pa.types.is_dictionary(kind):  # the width of its values, which replace the codes
        return _width_bytes(kind.value_type)
    if pa.types.is_fixed_size_list(kind):
        each = _width_bytes(kind.value_type)
        return None if each is None else kind.list_size * each
    if pa.types.is_struct(kind):
        parts = [_width_bytes(field.type) for field in kind]
        return None if None in parts else sum(part or 0 for part in parts)
    try:
        return max(1, int(kind.bit_width) // 8)
    except ValueError:
        return None

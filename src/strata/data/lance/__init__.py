"""Lance datasets as plans, which the same runtime reads as those of files.

    dataset (version, fragments) → planner: the survey and the plan of fragments, through `LanceFormat`

To the planner a fragment is a file, and a range of its rows is a row group, because Lance reads any rows of a fragment
without the others. May import every folder of `data` but `runtime`. `pylance` reads the rows, so every process that
plans or decodes imports it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from strata.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from strata.data.config import PlanConfig
    from strata.data.formats.base import Format
    from strata.data.plan.plan import Plan
    from strata.data.source.source import Source

Shared: TypeAlias = Callable[[Callable[[], bytes]], bytes]


@dataclass(frozen=True, slots=True)
class DatasetVersion:
    """The dataset and the version that a user requested."""

    uri: str
    version: int | None
    tag: str | None
    storage_options: Mapping[str, Any]


def plan_dataset(selected: DatasetVersion, config: PlanConfig, shared: Shared) -> tuple[Source, Plan, Format]:
    """Plan a version of a dataset; on all ranks the version that rank 0 found, and from its survey.

    `shared` calls a function on rank 0, if ranks can communicate, and returns its result on all of them.

    Raises:
        InvalidArgument: The dataset, the version or the tag does not exist, or an argument is invalid.
        ForkedProcess: This process was forked from one that uses pylance.
        ConfigError: pylance is not installed.
        SchemaMismatch: A column does not exist, or the filter does not fit the columns.
        NoData: No rows are left.
        DataError, StorageError: Files cannot be read; the message names them.
    """
    try:
        planner = importlib.import_module("strata.data.lance.planner")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"Lance datasets need the package {_PACKAGES.get(error.name or '', error.name)}; install it with: "
            "pip install 'strata-runtime[lance]'",
            field="uri",
        ) from error
    source, plan, format = planner.plan(selected, config, shared)
    return source, plan, format


_PACKAGES = {"lance": "pylance"}
"""Packages whose name differs from that of their module."""
